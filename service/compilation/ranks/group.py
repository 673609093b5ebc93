"""Exchanges values between ranks: they climb together, or one would wait for the other in a collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Return ``value`` of every rank, by rank; a list of one in a process without a group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(seconds: float) -> float:
    """Return the largest of the ranks' durations, the same on every rank."""
    return float(max(gather(seconds)))


def any_rank(flag: bool) -> bool:
    return any(gather(flag))


def barrier(device: torch.device) -> None:
    """Wait for all ranks; nothing in a process without a group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
