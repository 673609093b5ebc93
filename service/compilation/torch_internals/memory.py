"""Peak device memory; CUDA only."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Peak:
    """Largest memory in GiB: in tensors, and taken from the device, with the private pools of CUDA graphs."""

    allocated_gib: float
    reserved_gib: float


def reset_peak(device: torch.device) -> None:
    """Count from here, without what earlier runs left to the garbage collector."""
    if device.type == "cuda":
        gc.collect()
        # Before the first tensor on a device there is nothing whose peak could be reset.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak | None:
    """Return the peak since ``reset_peak``; ``None`` where nothing counts it."""
    if device.type != "cuda":
        return None
    return Peak(torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB)
