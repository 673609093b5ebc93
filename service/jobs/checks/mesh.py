"""Whether the model can be cut as the mesh asks."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.subject import AnySpec
from service.jobs.records import Problem
from service.jobs.spec import VerifySpec
from service.jobs.spec.model import FromJob, ModelConfig


def check_mesh(spec: AnySpec, config: ModelConfig | None) -> Iterator[Problem]:
    if config is None:
        return
    stages = spec.parallel.pp if isinstance(spec, VerifySpec) else spec.stages
    for path, message, got, expected in config.check_parallel(spec.parallel, stages):
        if not isinstance(spec.model, FromJob):
            yield Problem(path, message, got, expected)
        elif path.startswith("parallel."):
            yield Problem(path, f"job {spec.model.job}: {message}", got, expected)
        else:
            size = f"job {spec.model.job}, {path}: {message}"
            yield Problem("parallel.tp", size, spec.parallel.tp, f"a divisor of {got}")
