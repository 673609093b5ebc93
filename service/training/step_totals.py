"""Sums up a step's results over all ranks: one small all-reduce per optimizer step.

A number that ranks add up is declared once, as a field of :class:`RankShare`; its place in the vector follows from it.

The use, memory and power of each device are measured once a second at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from service.parallel.distributed import rank_and_size
from service.training.gradients import NonFiniteError
from service.training.timeline import bubble_fraction

EVERY_S = 1.0
"""The least time between two measurements: the driver's own figures are means over about as long."""
_PAGE_GIB = 4096 / 2**30


@dataclass(frozen=True)
class DeviceUse:
    """Tells a device's use since its last measurement.

    ``busy`` is a share of the time: on CUDA that in which any kernel ran, on a CPU the processor time of the rank,
    with one core as 1. ``held_gib`` is memory now; ``power_w`` is 0 if it is not measured.
    """

    busy: float = 0.0
    held_gib: float = 0.0
    power_w: float = 0.0


class DeviceMeter:
    """Measures one rank's device. A driver that does not answer leaves zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at, self._spent = time.monotonic(), time.process_time()
        self.latest = DeviceUse()

    def refresh(self) -> bool:
        """Measure again if it is due; return whether it was."""
        now = time.monotonic()
        if now - self._at < EVERY_S:
            return False
        spent = time.process_time()
        self.latest = self._of_cuda() if self._device.type == "cuda" else self._of_cpu(now, spent)
        self._at, self._spent = now, spent
        return True

    def _of_cuda(self) -> DeviceUse:
        held = held_gib(self._device)
        with suppress(Exception):  # NVML raises errors of its own, and is absent on some hosts
            busy = torch.cuda.utilization(self._device) / 100
            return DeviceUse(busy, held, torch.cuda.power_draw(self._device) / 1000)
        return DeviceUse(held_gib=held)

    def _of_cpu(self, now: float, spent: float) -> DeviceUse:
        return DeviceUse((spent - self._spent) / (now - self._at), held_gib(self._device))


def held_gib(device: torch.device) -> float:
    """Return the memory that tensors have on a CUDA device, or this process on the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_GIB


def metrics_of(devices: tuple[DeviceUse, ...]) -> dict[str, float]:
    """Return the use of all devices as metrics, each name with its rank; without power if it is not measured."""
    metrics: dict[str, float] = {}
    for rank, use in enumerate(devices):
        metrics[f"device_busy.{rank}"], metrics[f"device_memory_gib.{rank}"] = use.busy, use.held_gib
        if use.power_w:
            metrics[f"device_power_w.{rank}"] = use.power_w
    return metrics


_SUMMED: Mapping[str, Any] = MappingProxyType({"per_rank": False})
"""A field whose values are added up over the ranks."""
_PER_RANK: Mapping[str, Any] = MappingProxyType({"per_rank": True})
"""A field for which all ranks afterwards know the value of each."""
BAD_GRADIENT, BAD_LOSS = 1.0, 2.0


@dataclass(frozen=True)
class RankShare:
    """One rank's share of a step's totals. Tensors are scalars on the rank's device; all else is known to its host.

    ``stop``: the rank was asked to stop; ``end``: the first one, to end as a success. ``unsaved``: it could not write a
    checkpoint. ``busy`` and ``window`` are the seconds in which its device computed in the newest pipeline run that it
    finished, and those of the whole run.
    ``memory_gib`` is its peak memory; ``device_busy``, ``held_gib`` and ``power_w`` are as :class:`DeviceUse` has them.
    ``non_finite`` marks a rank whose own loss or gradient is not finite.
    """

    loss: Tensor = field(metadata=_SUMMED)
    squared_norm: Tensor = field(metadata=_SUMMED)
    stop: bool = field(metadata=_SUMMED)
    end: bool = field(default=False, metadata=_SUMMED)
    unsaved: bool = field(default=False, metadata=_SUMMED)
    busy: float = field(default=0.0, metadata=_SUMMED)
    window: float = field(default=0.0, metadata=_PER_RANK)
    memory_gib: float = field(default=0.0, metadata=_PER_RANK)
    device_busy: float = field(default=0.0, metadata=_PER_RANK)
    held_gib: float = field(default=0.0, metadata=_PER_RANK)
    power_w: float = field(default=0.0, metadata=_PER_RANK)
    non_finite: Tensor = field(init=False, metadata=_PER_RANK)

    def __post_init__(self) -> None:
        marks = BAD_LOSS * ~self.loss.detach().isfinite() + BAD_GRADIENT * ~self.squared_norm.isfinite()
        object.__setattr__(self, "non_finite", marks)


@dataclass(frozen=True)
class StepTotals:
    """Values of one step that are equal on every rank; ``memory_gib`` is the largest peak of any.

    ``unsaved`` says that a rank could not write a checkpoint. ``bubble_fraction`` is that of the newest pipeline run
    that every device has finished, if any.
    """

    loss: float
    grad_norm: float
    stop: bool
    unsaved: bool
    memory_gib: float
    bubble_fraction: float | None
    devices: tuple[DeviceUse, ...]
    """Each device's use at its last measurement."""
    end: bool = False


class StepReduction:
    """Adds up the ranks' shares over the mesh without making the host wait for the device.

    The float64 vector has one slot for each summed field of :class:`RankShare`, then one per rank for each other field.
    ``grad_norm`` is the global gradient norm, a scalar on the device.
    """

    def __init__(self, share: RankShare) -> None:
        rank, world = rank_and_size()
        device = share.squared_norm.device
        self._first = _first_slots(world)
        slots = {name: slot + rank if per_rank else slot for name, (slot, per_rank) in self._first.items()}
        values = {name: getattr(share, name) for name in slots}
        host = torch.zeros(_length(world), dtype=torch.float64)
        for name, value in values.items():
            if not isinstance(value, Tensor):
                host[slots[name]] = float(value)
        vector = host.to(device, non_blocking=True)
        for name, value in values.items():
            if isinstance(value, Tensor):
                vector[slots[name]] = value.detach()
        if world > 1:
            dist.all_reduce(vector)
        self.grad_norm = vector[slots["squared_norm"]].sqrt()
        self._host = vector if device.type == "cpu" else _to_host(vector)
        self._copied = None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()

    def read(self, step: int) -> StepTotals:
        """Wait for the numbers. :class:`NonFiniteError` names ``step`` and the rank whose numbers are not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        world = rank_and_size()[1]
        values = self._host.tolist()
        sums = {name: values[slot] for name, (slot, per_rank) in self._first.items() if not per_rank}
        ranks = {name: values[slot:][:world] for name, (slot, per_rank) in self._first.items() if per_rank}
        _check_finite(ranks["non_finite"], step)
        measured = min(ranks["window"]) > 0
        return StepTotals(
            loss=sums["loss"],
            grad_norm=math.sqrt(sums["squared_norm"]),
            stop=sums["stop"] > 0,
            end=sums["end"] > 0,
            unsaved=sums["unsaved"] > 0,
            memory_gib=max(ranks["memory_gib"]),
            bubble_fraction=bubble_fraction(sums["busy"], world, max(ranks["window"])) if measured else None,
            devices=tuple(map(DeviceUse, ranks["device_busy"], ranks["held_gib"], ranks["power_w"])),
        )


def _first_slots(world: int) -> dict[str, tuple[int, bool]]:
    """Return for each field its first slot, and whether it has one for each rank."""
    slots, used = {}, 0
    for declared in fields(RankShare):
        per_rank: bool = declared.metadata["per_rank"]
        slots[declared.name] = (used, per_rank)
        used += world if per_rank else 1
    return slots


def _length(world: int) -> int:
    return sum(world if declared.metadata["per_rank"] else 1 for declared in fields(RankShare))


def _to_host(vector: Tensor) -> Tensor:
    """Start a copy and return it: without pinned memory the host would wait for all pending work of the device."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)


def _check_finite(marks: list[float], step: int) -> None:
    worst = max(marks)
    if worst == 0:
        return
    what = "loss" if worst >= BAD_LOSS else "gradient norm"
    raise NonFiniteError(f"the {what} is not finite on rank {marks.index(worst)} at step {step}")
