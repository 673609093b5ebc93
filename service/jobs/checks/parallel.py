"""Checks whether the model can be divided over the mesh, and the pipeline's schedule is proved to run."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.plugins import ModelConfig, ParallelSpec
from service.jobs.records import Problem
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import FromJob
from service.jobs.spec.train import TrainSpec
from service.schedules import generator
from service.schedules.schedule import ScheduleError
from service.schedules.verify import verify


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


LARGEST = 2**14
"""Stages × micro-batches: what can be proved while a client waits for its answer."""


def check_pipeline(spec: TrainSpec | CompileSpec, micro_batches: int) -> Iterator[Problem]:
    """Yield why the schedule that the ranks would follow cannot be written, or proved complete and free of deadlock."""
    if spec.parallel.pp == 1:
        return
    if spec.sharding.reduce == "every":
        message = f"the schedule of pp={spec.parallel.pp} places the reductions"
        yield Problem("sharding.reduce", message, "every", "last, or a mesh without a pipeline")
    stages, pipeline = spec.stages, spec.pipeline
    if stages * micro_batches > LARGEST:
        message = f"{stages} stages × {micro_batches} micro-batches = {stages * micro_batches} forwards in a step"
        yield Problem("pipeline.micro_batches", message, micro_batches, f"at most {LARGEST // stages}")
        return
    numbers = f"pp={spec.parallel.pp}, {pipeline.stages_per_rank} stages per rank, {micro_batches} micro-batches"
    try:
        verify(generator(pipeline.schedule)(spec.parallel.pp, pipeline.stages_per_rank, micro_batches))
    except ScheduleError as error:
        yield Problem("pipeline.schedule", f"{numbers}: {error}", pipeline.schedule, "another schedule")
    except ValueError as error:
        yield Problem("pipeline.micro_batches", f"{numbers}: {error}", micro_batches, "numbers that the schedule takes")
