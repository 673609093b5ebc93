"""Computes least values over boxes, and patches of images."""

from __future__ import annotations

import triton
import triton.language as tl

from service.bounds.fused.kernels.places import entries_from, row_of_program

PLACED = ["rows", "channels", "tall", "broad", "height", "width", "place_batch"]
PLACED += ["stride_down", "stride_across", "offset_down", "offset_across"]


@triton.jit(do_not_specialize=["rows"])
def forward_least(a, centre, radius, out, n, rows, a_batch, a_row, BLOCK: tl.constexpr):
    """Compute ``Σ a·centre − |a|·radius`` of each row; centre and radius are ``(batch, n)``."""
    program, instance, row = row_of_program(rows)
    begin = a + instance * a_batch + row * a_row
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        x = tl.load(begin + j, here, 0.0)
        total += x * tl.load(centre + instance * n + j, here, 0.0)
        total -= tl.abs(x) * tl.load(radius + instance * n + j, here, 0.0)
    tl.store(out + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows"])
def backward_least(a, centre, radius, onto, to_a, n, rows, a_batch, a_row, BLOCK: tl.constexpr):
    program, instance, row = row_of_program(rows)
    begin = a + instance * a_batch + row * a_row
    gradient = tl.load(onto + program)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        x = tl.load(begin + j, here, 0.0)
        middle = tl.load(centre + instance * n + j, here, 0.0)
        spread = tl.load(radius + instance * n + j, here, 0.0)
        towards = tl.where(x > 0, middle - spread, tl.where(x < 0, middle + spread, middle))
        tl.store(to_a + program * n + j, (gradient * towards).to(onto.dtype.element_ty), here)


@triton.jit
def _moved(place, stride, offset):
    """Return a corner's entry by the place that it has."""
    return (tl.load(place) * stride + offset).to(tl.int32)


@triton.jit
def _shown(e, here, instance, down, across, channels, tall, broad, height, width):
    """Return places of entries ``e`` of a patch ``(channels, height, width)`` in its image, and which are inside."""
    channel, rest = e // (height * width), e % (height * width)
    y, x = down + rest // width, across + rest % width
    inside = here & (y >= 0) & (y < tall) & (x >= 0) & (x < broad)
    return ((instance * channels + channel) * tall + y) * broad + x, inside


@triton.jit(do_not_specialize=PLACED)
def lines_in_patches(
    a, place, lower, upper, below, above, out, bias, rows, channels, tall, broad, height, width,
    a_batch, a_row, place_batch, stride_down, stride_across, offset_down, offset_across,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do as ``forward_lines`` for lines over images ``(batch, channels, tall, broad)`` as seen in patches, 0 outside.

    ``place`` is ``(batch or 1, rows, 2)``, to be multiplied and moved to get a patch's upper left corner.
    """
    program, instance, row = row_of_program(rows)
    n = channels * height * width
    corner = place + instance * place_batch + row * 2
    down, across = _moved(corner, stride_down, offset_down), _moved(corner + 1, stride_across, offset_across)
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        e, here = entries_from(first, n, BLOCK)
        at, inside = _shown(e, here, instance, down, across, channels, tall, broad, height, width)
        x = tl.load(a + instance * a_batch + row * a_row + e, here, 0.0)
        low, high = tl.load(lower + at, inside, 0.0), tl.load(upper + at, inside, 0.0)
        tl.store(out + program * n + e, x * tl.where(x > 0, low, high), here)
        if BELOW:
            total += tl.where(x > 0, x * tl.load(below + at, inside, 0.0), 0.0)
        if ABOVE:
            total += tl.where(x > 0, 0.0, x * tl.load(above + at, inside, 0.0))
    if BELOW or ABOVE:
        tl.store(bias + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=PLACED)
def least_in_patches(
    a, place, lower, upper, out, rows, channels, tall, broad, height, width,
    a_batch, a_row, place_batch, stride_down, stride_across, offset_down, offset_across, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the least value of each row's patch over boxes of images; see ``lines_in_patches``."""
    program, instance, row = row_of_program(rows)
    n = channels * height * width
    corner = place + instance * place_batch + row * 2
    down, across = _moved(corner, stride_down, offset_down), _moved(corner + 1, stride_across, offset_across)
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        e, here = entries_from(first, n, BLOCK)
        at, inside = _shown(e, here, instance, down, across, channels, tall, broad, height, width)
        x = tl.load(a + instance * a_batch + row * a_row + e, here, 0.0)
        low, high = tl.load(lower + at, inside, 0.0) / 2, tl.load(upper + at, inside, 0.0) / 2
        total += x * (low + high) - tl.abs(x) * (high - low)
    tl.store(out + program, tl.sum(total, 0))
