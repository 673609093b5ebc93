"""Whether the model can be cut as the mesh asks."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.plugins import ModelConfig, ParallelSpec
from service.jobs.records import Problem
from service.jobs.spec.model import FromJob


def check_mesh(parallel: ParallelSpec, stages: int, model: object, config: ModelConfig) -> Iterator[Problem]:
    """Yield why a model cannot be cut into ``stages`` over the ranks.

    ``model`` is the spec's reference to it, ``config`` the family's configuration behind the reference.
    """
    for path, message, got, expected in config.check_parallel(parallel, stages):
        if not isinstance(model, FromJob):
            yield Problem(path, message, got, expected)
        elif path.startswith("parallel."):
            yield Problem(path, f"job {model.job}: {message}", got, expected)
        else:
            yield Problem("parallel.tp", f"job {model.job}, {path}: {message}", parallel.tp, f"a divisor of {got}")
