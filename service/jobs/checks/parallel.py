"""Checks that a model can be divided over its mesh, that its pipeline runs, and that the fleet has the devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from service.jobs.launchers import LOCAL, launchers, unknown_launcher
from service.jobs.plugins import CheckContext, CommonSpec, ModelConfig, ParallelSpec
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
"""Stages × micro-batches, at most: a client waits while they are proved."""


def check_pipeline(spec: TrainSpec | CompileSpec, micro_batches: int) -> Iterator[Problem]:
    """Yield why the ranks' schedule cannot be written, or proved complete and free of deadlock."""
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


def pool_of(spec: CommonSpec, context: CheckContext) -> Literal["cuda", "cpu"]:
    """Return the pool in which the ranks would run now: the spec's, or the one that placement chooses for ``auto``."""
    return context.auto_pool if spec.device == "auto" else spec.device


def check_float8(spec: TrainSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the fleet cannot compute in float8, if the job asks for that."""
    if spec.precision.float8 and context.fleet_capacity is not None and pool_of(spec, context) == "cpu":
        message = "float8 layers need CUDA devices of sm_89 or later, and this job would run on cpu"
        yield Problem("precision.float8", message, True, "false")


def check_fleet(spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the known hosts could never hold the job's ranks: drained ones may be resumed, and with them ``auto``
    may come to stand for CUDA.
    """
    fleet_capacity = context.fleet_capacity
    if spec.launcher is not None and spec.launcher != LOCAL:
        if spec.launcher not in (known := launchers()):
            yield Problem("launcher", unknown_launcher(spec.launcher), spec.launcher, ", ".join([LOCAL, *known]))
        return
    if fleet_capacity is None:
        return
    pool = pool_of(spec, context)
    if spec.device == "auto" and fleet_capacity.get("cuda", 0) > fleet_capacity.get(pool, 0):
        pool = "cuda"
    available = fleet_capacity.get(pool, 0)
    if available == 0:
        others = ", ".join(name for name, count in fleet_capacity.items() if count) or "none"
        yield Problem("device", f"the fleet has no {pool} devices", spec.device, f"a device that it has: {others}")
    elif spec.parallel.world_size > available:
        message = f"{spec.parallel.arithmetic} ranks, but the fleet has {available} {pool} devices"
        yield Problem("parallel", message, spec.parallel.world_size, f"at most {available} ranks")
