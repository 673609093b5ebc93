"""Rewrites pools and resampling as convolutions, matrices along one dimension, and maxima in pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from service.bounds.decompositions.elementwise import minimum
from service.bounds.decompositions.indexing import along

aten = torch.ops.aten


def average_pool(  # noqa: PLR0917 - the signature of the operator, as below
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return a convolution of each channel with a constant kernel, divided by the count of each window."""
    dimensions, channels = x.ndim - 2, x.shape[1]
    kernel = _each(kernel_size, dimensions)
    pads, steps = _each(padding, dimensions), _each(stride or kernel, dimensions)
    spatial = [int(length) for length in x.shape[2:]]
    extra = [_beyond(*window, ceil_mode) for window in zip(spatial, kernel, steps, pads, strict=True)]
    widths = [width for pad, more in zip(reversed(pads), reversed(extra), strict=True) for width in (pad, pad + more)]
    ones = torch.ones(channels, 1, *kernel, dtype=x.dtype, device=x.device)
    none, once = [0] * dimensions, [1] * dimensions
    if not any(extra) and (count_include_pad or not any(pads)):
        weight = ones / (divisor_override or torch.Size(kernel).numel())
        pooled: Tensor = aten.convolution(x, weight, None, steps, pads, once, False, none, channels)
        return pooled
    padded = aten.constant_pad_nd(x, widths) if any(widths) else x
    total: Tensor = aten.convolution(padded, ones, None, steps, none, once, False, none, channels)
    if divisor_override:
        return total / divisor_override
    divisors = torch.ones(1, *[1] * dimensions, dtype=x.dtype, device=x.device)
    for index, (length, size, step, pad) in enumerate(zip(spatial, kernel, steps, pads, strict=True)):
        border = pad if count_include_pad else 0
        start = torch.arange(int(total.shape[index + 2]), device=x.device) * step - pad
        counted = (start + size).clamp(max=length + border) - start.clamp(min=-border)
        divisors = divisors * counted.to(x.dtype).reshape(-1, *[1] * (dimensions - 1 - index))
    return total / divisors


def max_pool(  # noqa: PLR0917
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    """Return the maximum of the window's entries, pair by pair.

    A window that reaches over the border also holds the border's entry, so repeating that entry changes nothing.
    """
    dimensions = x.ndim - 2
    kernel, apart = _each(kernel_size, dimensions), _each(dilation, dimensions)
    pads, steps = _each(padding, dimensions), _each(stride or kernel, dimensions)
    if (ceil_mode or any(pads)) and any(step != 1 for step in apart):
        raise NotImplementedError("max pooling with dilation and padding or ceil_mode")
    for index in range(dimensions):
        more = _beyond(int(x.shape[index + 2]), kernel[index], steps[index], pads[index], ceil_mode)
        x = _repeat_border(x, index + 2, pads[index], pads[index] + more)
    spans = [(kernel[index] - 1) * apart[index] + 1 for index in range(dimensions)]
    reach = [(x.shape[index + 2] - spans[index]) // steps[index] + 1 for index in range(dimensions)]
    entries = []
    for offsets in product(*(range(length) for length in kernel)):
        entry = x
        for index, offset in enumerate(offsets):
            start = offset * apart[index]
            entry = aten.slice(entry, index + 2, start, start + (reach[index] - 1) * steps[index] + 1, steps[index])
        entries.append(entry)
    return _in_pairs(entries, torch.maximum)


def max_pool_with_indices(x: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    """Return indices for the signature alone: a model that uses them is refused."""
    return max_pool(x, *arguments), x.new_empty(0)  # type: ignore[arg-type]


def _in_pairs(entries: list[Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    while len(entries) > 1:
        paired = [join(first, second) for first, second in zip(entries[::2], entries[1::2], strict=False)]
        entries = paired + entries[len(paired) * 2 :]
    return entries[0]


def largest(x: Tensor, dim: Sequence[int] | int = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dim, keepdim, torch.maximum)


def smallest(x: Tensor, dim: Sequence[int] | int = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dim, keepdim, minimum)


def multiplied(x: Tensor, dim: int, keepdim: bool = False, *, dtype: object = None) -> Tensor:
    return _extreme(x, dim, keepdim, torch.mul)


def _extreme(x: Tensor, dim: Sequence[int] | int, keepdim: bool, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    given = [dim] if isinstance(dim, int) else list(dim)
    over = sorted(index % x.ndim for index in given) if given else list(range(x.ndim))
    if 0 in over:
        raise NotImplementedError("an extreme value over the batch")
    for index in reversed(over):
        # Halves, not entries one by one: a few large operators instead of many small ones.
        while x.shape[index] > 1:
            half = x.shape[index] // 2
            joined = join(along(x, index, 0, half), along(x, index, half, 2 * half))
            rest = x.shape[index] - 2 * half
            x = torch.cat([joined, along(x, index, 2 * half, 2 * half + rest)], index) if rest else joined
        x = x if keepdim else x.squeeze(index)
    return x


def adaptive_average_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Average along each dimension by a matrix, one window per row."""
    for index, count in enumerate(_each(output_size, x.ndim - 2)):
        length = int(x.shape[index + 2])
        row, entry = torch.arange(count, device=x.device)[:, None], torch.arange(length, device=x.device)
        start, end = row * length // count, ((row + 1) * length + count - 1) // count
        inside = ((entry >= start) & (entry < end)).to(x.dtype)
        x = _mixed(x, index + 2, inside / (end - start).to(x.dtype))
    return x


def adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    for index, count in enumerate(_each(output_size, x.ndim - 2)):
        dim = index + 2
        windows = _windows(int(x.shape[dim]), count)
        x = torch.cat([largest(along(x, dim, start, end), dim, True) for start, end in windows], dim)
    return x, x.new_empty(0)


def upsample_nearest(x: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None) -> Tensor:
    for index, (count, ratio) in enumerate(_scales(x, output_size, scale_factors)):
        # As torch's kernels count: their rounding to float32 decides between two entries.
        at = torch.arange(count, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
        x = x.index_select(index + 2, (at * ratio).float().floor().clamp(max=x.shape[index + 2] - 1).to(torch.int64))
    return x


def upsample_linear(
    x: Tensor, output_size: Sequence[int] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> Tensor:
    """Interpolate along each dimension by a matrix whose rows weigh the two nearest entries."""
    for index, (count, ratio) in enumerate(_scales(x, output_size, scale_factors)):
        length = int(x.shape[index + 2])
        at = torch.arange(count, dtype=torch.float64, device=x.device)
        at = at * ((length - 1) / max(count - 1, 1)) if align_corners else (at + 0.5) * ratio - 0.5
        entry = torch.arange(length, dtype=torch.float64, device=x.device)
        nearness = 1 - (at.clamp(0, length - 1)[:, None] - entry).abs()
        x = _mixed(x, index + 2, nearness.clamp(min=0).to(x.dtype))
    return x


def _scales(
    x: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> list[tuple[int, float]]:
    """Return the new length and the step in the old one, for each dimension."""
    lengths = [int(length) for length in x.shape[2:]]
    if output_size is not None:
        return [(int(count), length / int(count)) for length, count in zip(lengths, output_size, strict=True)]
    assert scale_factors is not None
    return [(int(length * factor), 1 / factor) for length, factor in zip(lengths, scale_factors, strict=True)]


def _windows(length: int, count: int) -> list[tuple[int, int]]:
    return [(index * length // count, -(-(index + 1) * length // count)) for index in range(count)]


def _mixed(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    last = x.ndim - 1
    moved = x.transpose(dim, last) if dim != last else x
    found: Tensor = aten.linear(moved, matrix)
    return found.transpose(dim, last) if dim != last else found


def _beyond(length: int, kernel: int, step: int, pad: int, ceil_mode: bool) -> int:
    """Return how far the last window reaches over the padding; windows start within the input or before it."""
    if not ceil_mode:
        return 0
    count = -(-(length + 2 * pad - kernel) // step) + 1
    if (count - 1) * step >= length + pad:
        count -= 1
    return max(0, (count - 1) * step + kernel - length - 2 * pad)


def _repeat_border(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    if before == 0 and after == 0:
        return x
    first, last = along(x, dim, 0, 1), along(x, dim, x.shape[dim] - 1, x.shape[dim])
    return torch.cat([first] * before + [x] + [last] * after, dim)


def _each(given: Sequence[int], dimensions: int) -> list[int]:
    values = list(given)
    return values * dimensions if len(values) == 1 else values
