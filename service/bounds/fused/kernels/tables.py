"""Propagates coefficients through lines of tables."""

from __future__ import annotations

import triton
import triton.language as tl

from service.bounds.fused.kernels.places import entries_from, row_of_program


@triton.jit
def _table_line(slopes, intercepts, place, x, j, here, instance, n, lines):
    """Return the line at a place of a table ``(batch, 2·lines, n)``, and its derivative there."""
    scaled = place * (lines - 1)
    line = tl.minimum(tl.maximum(tl.floor(scaled), 0.0), lines - 2)
    beyond = scaled - line
    at = (instance * 2 * lines + line.to(tl.int64) + tl.where(x < 0, lines, 0)) * n + j
    slope, intercept = tl.load(slopes + at, here, 0.0), tl.load(intercepts + at, here, 0.0)
    steeper = tl.load(slopes + at + n, here, 0.0) - slope
    higher = tl.load(intercepts + at + n, here, 0.0) - intercept
    # If one of two lines is not finite, only the first counts: a mixed slope with its intercept would not be a line.
    both = (tl.abs(steeper) < float("inf")) & (tl.abs(higher) < float("inf"))
    steeper, higher = tl.where(both, steeper, 0.0), tl.where(both, higher, 0.0)
    return slope + beyond * steeper, intercept + beyond * higher, steeper * (lines - 1), higher * (lines - 1)


@triton.jit(do_not_specialize=["rows", "lines"])
def forward_table(a, places, slopes, intercepts, out, bias, n, rows, lines, a_batch, a_row, BLOCK: tl.constexpr):
    """Lead coefficients through the lines at ``places`` ``(batch, rows, n)``."""
    program, instance, row = row_of_program(rows)
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        x = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        slope, intercept, _, _ = _table_line(slopes, intercepts, place, x, j, here, instance, n, lines)
        tl.store(out + program * n + j, x * slope, here)
        total += x * intercept
    tl.store(bias + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows", "lines"])
def backward_table(
    a, places, slopes, intercepts, onto, onto_bias, to_a, to_places, n, rows, lines, a_batch, a_row,
    TO_A: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, instance, row = row_of_program(rows)
    constant = tl.load(onto_bias + program)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        x = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        gradient = tl.load(onto + program * n + j, here, 0.0)
        slope, intercept, steeper, higher = _table_line(slopes, intercepts, place, x, j, here, instance, n, lines)
        tl.store(to_places + program * n + j, x * (gradient * steeper + constant * higher), here)
        if TO_A:
            tl.store(to_a + program * n + j, gradient * slope + constant * intercept, here)
