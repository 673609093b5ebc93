"""Peak device memory; CUDA only."""

from __future__ import annotations

import gc

import torch

GIB = 2**30


def reset_peak(device: torch.device) -> None:
    """Count from here, without what earlier runs left to the garbage collector."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Largest memory in tensors since ``reset_peak``, in GiB; ``None`` where nothing counts it."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
