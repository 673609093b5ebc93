"""Rewrites entrywise functions by ReLU, the exponential and other functions that have rules."""

from __future__ import annotations

from math import inf, log

import torch
from torch import Tensor

aten = torch.ops.aten


def clamp(x: Tensor, lowest: Tensor | float | None = None, highest: Tensor | float | None = None) -> Tensor:
    x = x if lowest is None else _at_least(x, lowest)
    return x if highest is None else -_at_least(-x, -highest)


def _at_least(x: Tensor, lowest: Tensor | float) -> Tensor:
    if isinstance(lowest, Tensor):
        return torch.maximum(x, lowest)
    if lowest == 0:
        return torch.relu(x)
    return x if lowest == -inf else torch.maximum(x, torch.full((), lowest, dtype=x.dtype, device=x.device))


def hardtanh(x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return clamp(x, min_val, max_val)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return -torch.maximum(-x, -y)


def two_pieces(x: Tensor, slope: Tensor | float) -> Tensor:
    """Return the identity above 0 and ``slope`` below, for any slope, by one ReLU, so that nothing is lost."""
    return slope * x + (1 - slope) * torch.relu(x)


def rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: object = None
) -> Tensor:
    if training:
        raise NotImplementedError("rrelu in training, which draws random numbers")
    return two_pieces(x, (lower + upper) / 2)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Apply one slope for all entries, or one for each channel, dimension 1."""
    return two_pieces(x, weight.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim > 1 else weight)


def round_(x: Tensor) -> Tensor:
    """Round by ``floor``; at ties the two differ by 1, and the bounds of ``floor`` hold both of its sides there."""
    return torch.floor(x + 0.5)


def power_of(base: float, x: Tensor) -> Tensor:
    if not base > 0:
        raise NotImplementedError(f"a power whose base is {base} and whose exponent depends on the input")
    return torch.exp(x * log(base))


def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return -aten.softplus(-x), x.new_empty(0)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half) * torch.sigmoid(x.narrow(dim, half, half))
