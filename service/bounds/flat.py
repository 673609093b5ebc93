"""Flattens values, whatever their shape: one number, without dimensions, has one entry, and an empty one has none."""

from __future__ import annotations

from torch import Tensor


def by_instance(values: Tensor) -> Tensor:
    """Return values ``(batch, *shape)`` as ``(batch, entries)``."""
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)


def by_row(values: Tensor) -> Tensor:
    """Return values ``(batch, rows, *shape)`` as ``(batch, rows, entries)``."""
    return values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
