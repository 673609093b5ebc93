"""Whether the objective can be minimised by this job."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.subject import AnySpec
from service.jobs.records import Problem
from service.jobs.spec import TrainSpec


def check_objective(spec: AnySpec) -> Iterator[Problem]:
    if isinstance(spec, TrainSpec):
        for reason in spec.objective.check(spec, spec.data.gives):
            yield Problem(*reason)
