"""Divides rows of float32 into halves of float16, and multiplies those."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scale_of(values):
    """Return a power of two for each row that brings its largest entry to 2^14 or just above, and its inverse."""
    largest = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(largest, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_halves(at, values, k, here):
    """Write the high halves of values at ``at``, and the low ones ``k`` entries behind."""
    high = values.to(tl.float16)
    tl.store(at, high, here)
    tl.store(at + k, (values - high.to(tl.float32)).to(tl.float16), here)


@triton.jit(do_not_specialize=["m"])
def divide_rows(a, out, unscaled, m, k, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Write the halves of ``a`` ``(m, k)`` beside each other, ``(m, 2, k)``, and what undoes the scale of each row."""
    i = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    j = tl.arange(0, BLOCK)
    here = (i < m)[:, None] & (j < k)[None, :]
    x = tl.load(a + i[:, None] * k + j[None, :], here, 0.0)
    scale, inverse = _scale_of(x)
    _store_halves(out + i[:, None] * 2 * k + j[None, :], x * scale[:, None], k, here)
    tl.store(unscaled + i, inverse, i < m)


@triton.jit(do_not_specialize=["m"])
def product_of_halves(
    a, high, low, row_unscaled, column_unscaled, out, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Halves ``a`` ``(m, 2, k)`` times the halves ``(k, n)`` of a weight, scaled back; with ADDS, added to ``out``.

    ``k`` and ``n`` are multiples of their blocks.
    """
    program = tl.program_id(0)
    across = n // BLOCK_N
    group = program // (GROUP * across)
    height = min(tl.cdiv(m, BLOCK_M) - group * GROUP, GROUP)
    down = group * GROUP + (program % (GROUP * across)) % height
    right = (program % (GROUP * across)) // height
    i = down.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = right * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + tl.minimum(i, m - 1)[:, None] * 2 * k + inner[None, :]
    b_at = inner[:, None] * n + j[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        a_high, b_high = tl.load(a_at), tl.load(high + b_at)
        # A sum of its own: tensor cores cut off what they add, so that a long sum would drift.
        part = tl.dot(tl.load(a_at + k), b_high)
        part = tl.dot(a_high, tl.load(low + b_at), part)
        total += tl.dot(a_high, b_high, part)
        a_at += BLOCK_K
        b_at += BLOCK_K * n
    total *= tl.load(row_unscaled + i, i < m, 0.0)[:, None] * tl.load(column_unscaled + j)[None, :]
    at, here = out + i[:, None] * n + j[None, :], (i < m)[:, None]
    if ADDS:
        total += tl.load(at, here, 0.0)
    tl.store(at, total, here)
