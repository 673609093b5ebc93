"""Rewrites operators that choose, repeat and add up entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def along(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    chosen: Tensor = aten.slice(x, dim, start, end)
    return chosen


def select(x: Tensor, dim: int, index: int) -> Tensor:
    start = index if index >= 0 else index + x.shape[dim]
    return along(x, dim, start, start + 1).squeeze(dim)


def split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    ends = [sum(split_sizes[: index + 1]) for index in range(len(split_sizes))]
    return [along(x, dim, end - size, end) for end, size in zip(ends, split_sizes, strict=True)]


def flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    if any(dim % x.ndim == 0 for dim in dims):
        raise NotImplementedError("a flip of the batch")
    for dim in dims:
        x = x.index_select(dim, torch.arange(x.shape[dim] - 1, -1, -1, device=x.device))
    return x


def repeat(x: Tensor, repeats: Sequence[Any]) -> Tensor:
    """Repeat along each dimension; new ones in front cannot be, since the batch is the first."""
    if len(repeats) != x.ndim or repeats[0] != 1:
        raise NotImplementedError(f"a repetition {list(repeats)} that changes the batch")
    for dim, count in enumerate(repeats):
        if count != 1:
            x = torch.cat([x] * count, dim)
    return x


def cumulated(x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Return a lower triangular matrix of ones along ``dim``."""
    if dim % x.ndim == 0:
        raise NotImplementedError("sums over the batch")
    length = x.shape[dim]
    ones = torch.ones(length, length, dtype=x.dtype, device=x.device).tril()
    found: Tensor = aten.linear(x.transpose(dim, -1), ones)
    return found.transpose(dim, -1)


def indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Read at constant indices into neighbouring dimensions: one selection from them, flattened."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    chosen = [index for index in indices if index is not None]
    if not used or used[0] == 0 or used != list(range(used[0], used[-1] + 1)):
        raise NotImplementedError("indices into the batch, or into dimensions that are not next to each other")
    if any(index.dtype == torch.bool for index in chosen):
        raise NotImplementedError("a mask as an index")
    lengths = [x.shape[dim] for dim in used]
    position = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, length in zip(chosen, lengths, strict=True):
        position = position * length + torch.where(index < 0, index + length, index)
    flat = x.flatten(used[0], used[-1]) if len(used) > 1 else x
    found = flat.index_select(used[0], position.reshape(-1))
    return found.reshape(*x.shape[: used[0]], *position.shape, *x.shape[used[-1] + 1 :])


def pad(x: Tensor, widths: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Repeat entries, in every mode but ``constant``."""
    if mode == "constant":
        padded: Tensor = aten.constant_pad_nd(x, list(widths), value or 0.0)
        return padded
    if mode == "circular" and min(widths) < 0:
        raise NotImplementedError(f"circular padding {list(widths)}, which takes entries away first")
    for number in range(len(widths) // 2):
        dim = x.ndim - 1 - number
        length, before, after = int(x.shape[dim]), widths[2 * number], widths[2 * number + 1]
        position = torch.arange(-before, length + after, device=x.device)
        x = x.index_select(dim, _source(position, length, mode))
    return x


def _source(position: Tensor, length: int, mode: str) -> Tensor:
    if mode == "circular":
        return position % length
    if mode == "replicate":
        return position.clamp(0, length - 1)
    return (length - 1) - ((length - 1) - position.abs()).abs()


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x · W_o · y`` for each output ``o``."""
    outputs, first, second = weight.shape
    through = aten.linear(x, weight.permute(0, 2, 1).reshape(outputs * second, first))
    found: Tensor = (through.reshape(*x.shape[:-1], outputs, second) * y.unsqueeze(-2)).sum([-1])
    return found if bias is None else found + bias
