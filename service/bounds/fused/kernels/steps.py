"""Computes gradients of matrix products, and steps along gradients."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ones(out, BLOCK: tl.constexpr):
    """Write ones: the smallest kernel, which shows whether kernels can be built here."""
    tl.store(out + tl.arange(0, BLOCK), 1.0)


@triton.jit
def rough_product(
    a, b, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """Multiply ``a`` ``(m, k)`` by the transpose of ``b`` ``(n, k)``, factors rounded to TF32."""
    program = tl.program_id(0)
    across = tl.cdiv(n, BLOCK_N)
    group = program // (GROUP * across)
    height = min(tl.cdiv(m, BLOCK_M) - group * GROUP, GROUP)
    down = group * GROUP + (program % (GROUP * across)) % height
    right = (program % (GROUP * across)) // height
    i = down.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = right.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + (i % m)[:, None] * k + inner[None, :]
    b_at = b + (j % n)[:, None] * k + inner[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, k, BLOCK_K):
        left = tl.load(a_at, inner[None, :] < k - first, 0.0)
        above = tl.load(b_at, inner[None, :] < k - first, 0.0)
        total = tl.dot(left, above.T, total, input_precision="tf32")
        a_at += BLOCK_K
        b_at += BLOCK_K
    tl.store(out + i[:, None] * n + j[None, :], total, (i[:, None] < m) & (j[None, :] < n))


@triton.jit
def adam(place, gradient, mean, square, steps, pace, count, BLOCK: tl.constexpr):
    """Take a step of Adam (Kingma and Ba, 2015) down the gradient, kept within 0 and 1; ``steps`` made before this one.

    ``pace`` has the first step's rate and the logarithm of its factor: as tensors, since Triton takes plain numbers as
    float32. All tensors are of one type, and so is the arithmetic.
    """
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = j < count
    step = tl.load(steps) + 1
    g = tl.load(gradient + j, here, 0.0)
    g = tl.where(tl.abs(g) < float("inf"), g, 0.0)
    m = 0.9 * tl.load(mean + j, here, 0.0) + 0.1 * g
    v = 0.999 * tl.load(square + j, here, 0.0) + 0.001 * g * g
    tl.store(mean + j, m, here)
    tl.store(square + j, v, here)
    # ln 0.9 and ln 0.999
    first, second = 1 - tl.exp(step * -0.10536051565782628), 1 - tl.exp(step * -0.0010005003335835335)
    speed = tl.load(pace) * tl.exp((step - 1) * tl.load(pace + 1)) / first
    moved = tl.load(place + j, here, 0.0) - speed * m / (tl.sqrt(v / second) + 1e-8)
    tl.store(place + j, tl.minimum(tl.maximum(moved, 0.0), 1.0), here)
