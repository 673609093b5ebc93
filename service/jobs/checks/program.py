"""Whether a program can run as its compile job asks; only its own package knows."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.subject import AnySpec
from service.jobs.records import Problem
from service.jobs.spec import CompileSpec


def check_program(spec: AnySpec) -> Iterator[Problem]:
    if isinstance(spec, CompileSpec) and spec.program is not None:
        for reason in spec.program.check(spec):
            yield Problem(*reason)
