"""Whether the pipeline's schedule exists for these numbers and is proved to run."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.records import Problem
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import TrainSpec
from service.schedules import generator
from service.schedules.schedule import ScheduleError
from service.schedules.verify import verify

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
