"""Propagates coefficients through lines, also from rows of a matrix and with free slopes."""

from __future__ import annotations

import triton
import triton.language as tl

from service.bounds.fused.kernels.places import entries_from, row_of_program


@triton.jit
def _start(a, index, a_batch, a_row, index_batch, instance, row, n, pairs, INDEXED: tl.constexpr):
    """Return where a row begins and its sign. Indexed rows are rows of a matrix, and the same again negated."""
    if INDEXED:
        picked = tl.load(index + instance * index_batch + row % pairs)
        return a + picked * n, tl.where(row < pairs, 1.0, -1.0)
    return a + instance * a_batch + row * a_row, 1.0


@triton.jit
def _load_signed(at, here, sign, INDEXED: tl.constexpr):
    x = tl.load(at, here, 0.0)
    return (x * sign).to(x.dtype) if INDEXED else x


@triton.jit
def _lower_slope(slope, free, codes, lines, j, here, flattest, instance, row_free, n, FREE: tl.constexpr):
    """Return the fixed slope, or the free one where a code is that of an open entry: see ``forward_lines``."""
    fixed = tl.load(slope + lines + j, here, 0.0)
    if FREE:
        code = tl.load(codes + instance * n + j, here, -1)
        open_ = code >= 0
        chosen = tl.load(free + row_free + code, here & open_, 0.0)
        return tl.where(open_, flattest + (1 - flattest) * chosen, fixed), code
    return fixed, j


@triton.jit(do_not_specialize=["rows", "pairs", "frees", "index_batch"])
def forward_lines(
    a, index, lower, upper, below, above, free, codes, out, bias, n, rows, pairs, frees, flattest,
    a_batch, a_row, index_batch, lower_batch, lower_row, upper_batch, upper_row, below_batch, below_row,
    above_batch, above_row,
    INDEXED: tl.constexpr, FREE: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lead coefficients through lines: slopes ``lower``, ``upper``, intercepts ``below``, ``above``.

    With FREE a lower slope is that of ``free`` ``(batch, rows, frees)`` where ``codes`` ``(batch, n)`` is 0 or more:
    there. A code of −2 − k marks an entry that is not open although place k is its own; −1 has none.
    """
    program, instance, row = row_of_program(rows)
    begin, sign = _start(a, index, a_batch, a_row, index_batch, instance, row, n, pairs, INDEXED)
    lower_at = instance * lower_batch + row * lower_row
    upper_at = upper + instance * upper_batch + row * upper_row
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        x = _load_signed(begin + j, here, sign, INDEXED)
        low, _ = _lower_slope(lower, free, codes, lower_at, j, here, flattest, instance, program * frees, n, FREE)
        high = tl.load(upper_at + j, here, 0.0)
        tl.store(out + program * n + j, (x * tl.where(x > 0, low, high)).to(out.dtype.element_ty), here)
        if BELOW:
            constant = tl.load(below + instance * below_batch + row * below_row + j, here, 0.0)
            total += tl.where(x > 0, x * constant, 0.0)
        if ABOVE:
            constant = tl.load(above + instance * above_batch + row * above_row + j, here, 0.0)
            total += tl.where(x > 0, 0.0, x * constant)
    if BELOW or ABOVE:
        tl.store(bias + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows", "pairs", "frees", "index_batch"])
def backward_lines(
    a, index, lower, upper, below, above, free, codes, onto, onto_bias,
    to_a, to_lower, to_upper, to_below, to_above, to_free, n, rows, pairs, frees, flattest,
    a_batch, a_row, index_batch, lower_batch, lower_row, upper_batch, upper_row, below_batch, below_row,
    above_batch, above_row,
    INDEXED: tl.constexpr, FREE: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
    TO_A: tl.constexpr, TO_LOWER: tl.constexpr, TO_UPPER: tl.constexpr, TO_BELOW: tl.constexpr, TO_ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``forward_lines``, from those onto its coefficients and its bias."""
    program, instance, row = row_of_program(rows)
    begin, sign = _start(a, index, a_batch, a_row, index_batch, instance, row, n, pairs, INDEXED)
    lower_at = instance * lower_batch + row * lower_row
    upper_at = upper + instance * upper_batch + row * upper_row
    if BELOW or ABOVE:
        constant_gradient = tl.load(onto_bias + program)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        x = _load_signed(begin + j, here, sign, INDEXED)
        gradient = tl.load(onto + program * n + j, here, 0.0)
        positive = x > 0
        at = program * n + j
        if FREE:
            code = tl.load(codes + instance * n + j, here, -1)
            found = tl.where(positive & (code >= 0), gradient * x * (1 - flattest), 0.0)
            place = tl.where(code >= 0, code, -2 - code)
            tl.store(to_free + program * frees + place, found.to(onto.dtype.element_ty), here & (code != -1))
        if TO_A:
            low, _ = _lower_slope(lower, free, codes, lower_at, j, here, flattest, instance, program * frees, n, FREE)
            high = tl.load(upper_at + j, here, 0.0)
            found = gradient * tl.where(positive, low, high)
            if BELOW:
                constant = tl.load(below + instance * below_batch + row * below_row + j, here, 0.0)
                found += tl.where(positive, constant_gradient * constant, 0.0)
            if ABOVE:
                constant = tl.load(above + instance * above_batch + row * above_row + j, here, 0.0)
                found += tl.where(positive, 0.0, constant_gradient * constant)
            tl.store(to_a + at, found.to(onto.dtype.element_ty), here)
        if TO_LOWER:
            tl.store(to_lower + at, tl.where(positive, gradient * x, 0.0).to(onto.dtype.element_ty), here)
        if TO_UPPER:
            tl.store(to_upper + at, tl.where(positive, 0.0, gradient * x).to(onto.dtype.element_ty), here)
        if TO_BELOW:
            tl.store(to_below + at, tl.where(positive, constant_gradient * x, 0.0).to(onto.dtype.element_ty), here)
        if TO_ABOVE:
            tl.store(to_above + at, tl.where(positive, 0.0, constant_gradient * x).to(onto.dtype.element_ty), here)
