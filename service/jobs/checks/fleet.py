"""Checks whether the fleet has the devices that a job asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from service.jobs.launchers import LOCAL, launchers, unknown_launcher
from service.jobs.plugins import CheckContext, CommonSpec
from service.jobs.records import Problem
from service.jobs.spec.train import TrainSpec


def pool_of(spec: CommonSpec, context: CheckContext) -> Literal["cuda", "cpu"]:
    """Return where the ranks would run at present: as the spec says, or where placement runs ``auto``."""
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
