"""Checks a whole spec: the checks of its kind, and those of any kind."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.dependencies import check_dependencies, check_files
from service.jobs.checks.fit import check_fleet
from service.jobs.kinds.registry import KINDS
from service.jobs.plugins import CheckContext, CommonSpec
from service.jobs.records import Problem
from service.jobs.text import first_control


def check_names(spec: CommonSpec) -> Iterator[Problem]:
    """Yield the control characters of names and labels. Only at submission: jobs that exist keep theirs and run."""
    labels = ((f"labels.{key}", value) for key, value in spec.labels.items())
    for path, text in (("name", spec.name), *labels):
        if (found := first_control(text)) is not None:
            yield Problem(path, f"it holds the control character {found}", text, "text of one line")


def check(spec: CommonSpec, context: CheckContext) -> list[Problem]:
    """Return every reason why this job could never run."""
    return [
        *check_names(spec),
        *check_dependencies(spec, context),
        *check_files(spec, context),
        *KINDS.declaration(spec.kind).check(spec, context),
        *check_fleet(spec, context),
    ]
