"""Measures how much memory a rank took at most."""

from __future__ import annotations

import resource

import torch


def peak_memory_gib(device: torch.device) -> float:
    """Return the most GiB that torch ever had allocated on a CUDA device; on a CPU the most that this process ever
    had in memory, which includes what it has imported.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
