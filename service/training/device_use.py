"""Measures how busy a rank's device is, and what it holds and draws, once a second at most."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

EVERY_S = 1.0
"""The least time between two measurements: the driver's own figures are means over about as long."""
_PAGE_GIB = 4096 / 2**30


@dataclass(frozen=True)
class DeviceUse:
    """Says what a device did since it was looked at last.

    ``busy`` is a share of the time: on CUDA that in which any kernel ran, on a CPU the processor time of the rank,
    where one core is 1. ``held_gib`` is memory now; ``power_w`` is 0 where nobody measures it.
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
        """Measure again if it is time to; return whether it was."""
        now = time.monotonic()
        if now - self._at < EVERY_S:
            return False
        spent = time.process_time()
        self.latest = self._of_cuda() if self._device.type == "cuda" else self._of_cpu(now, spent)
        self._at, self._spent = now, spent
        return True

    def _of_cuda(self) -> DeviceUse:
        held = torch.cuda.memory_allocated(self._device) / 2**30
        with suppress(Exception):  # NVML raises errors of its own, and is absent on some hosts
            busy = torch.cuda.utilization(self._device) / 100
            return DeviceUse(busy, held, torch.cuda.power_draw(self._device) / 1000)
        return DeviceUse(held_gib=held)

    def _of_cpu(self, now: float, spent: float) -> DeviceUse:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return DeviceUse((spent - self._spent) / (now - self._at), resident * _PAGE_GIB)


def metrics_of(devices: tuple[DeviceUse, ...]) -> dict[str, float]:
    """Return the use of all devices as metrics, each name with its rank; no power where none is measured."""
    metrics: dict[str, float] = {}
    for rank, use in enumerate(devices):
        metrics[f"device_busy.{rank}"], metrics[f"device_memory_gib.{rank}"] = use.busy, use.held_gib
        if use.power_w:
            metrics[f"device_power_w.{rank}"] = use.power_w
    return metrics
