"""Checks whether the fleet has the devices that a job asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from service.jobs.plugins import CheckContext, CommonSpec
from service.jobs.records import Problem
from service.jobs.spec.train import TrainSpec


def pool_of(spec: CommonSpec, fleet_capacity: Mapping[str, int]) -> Literal["cuda", "cpu"]:
    """Return where the ranks would run: as the spec says, or CUDA if the fleet has any, drained hosts among them."""
    if spec.device != "auto":
        return spec.device
    return "cuda" if fleet_capacity.get("cuda", 0) else "cpu"


def check_float8(spec: TrainSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the fleet cannot compute in float8, if the job asks for that."""
    capacity = context.fleet_capacity
    if spec.precision.float8 and capacity is not None and pool_of(spec, capacity) == "cpu":
        message = "float8 layers need CUDA devices of sm_89 or later, and this job would run on cpu"
        yield Problem("precision.float8", message, True, "false")


def check_fleet(spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the known hosts could never hold the job's ranks."""
    fleet_capacity = context.fleet_capacity
    if fleet_capacity is None:
        return
    pool = pool_of(spec, fleet_capacity)
    available = fleet_capacity.get(pool, 0)
    if available == 0:
        others = ", ".join(name for name, count in fleet_capacity.items() if count) or "none"
        yield Problem("device", f"the fleet has no {pool} devices", spec.device, f"a device that it has: {others}")
    elif spec.parallel.world_size > available:
        message = f"{spec.parallel.arithmetic} ranks, but the fleet has {available} {pool} devices"
        yield Problem("parallel", message, spec.parallel.world_size, f"at most {available} ranks")
