"""Multiplies large matrices of float32 on a GPU's tensor cores, at least as accurately as in float32.

A factor x is scaled by a power of two and written as ``h + l``: h is x rounded to float16, l what is left, rounded
too. Then ``a·b ≈ ah·bh + ah·bl + al·bh``, in three products of float16 (Ootomo and Yokota, Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance, 2022). Tensor cores cut off what does
not fit into a sum of float32, which makes long sums drift: theirs have ``BLOCK_K`` terms, and are added up beside them.

h + l has 22 bits, so a term loses at most ``3·2⁻²² |a·b|``, where a sum of n terms in float32 may lose ``n·2⁻²⁴`` of
their sizes. What is below the numbers of float16 loses at most ``2⁻³⁹`` of the largest entry of its row or, in a
weight, of its column, which are scaled together.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from service.bounds.fused.building import kernels_for

TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
SHARED = 2**10 * 196
"""Bytes that a multiprocessor shares among the threads of a tile, in all of its stages."""
LEAST_WORK = 2**34
"""Products of two numbers that are worth dividing the factors."""
LONGEST, ENTRIES = 2**13, 2**11
"""Entries of a row that are divided at once, and of the rows that one program takes."""
EXPONENT = 15
"""The exponent of the largest entry of a column: its products with a row's add up far below float32's largest."""
MOST = 126
"""The largest exponent whose negative is one of a normal number of float32 too."""


def multiply(rows: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
    """Return ``rows @ weight``, ``(m, k)`` and ``(k, n)``, added in place to ``total`` if there is one."""
    m, (k, n) = len(rows), weight.shape
    kernels = _kernels(rows, weight) if rows.is_contiguous() and (total is None or total.is_contiguous()) else None
    if kernels is None:
        return rows @ weight if total is None else total.addmm_(rows, weight)
    block = 1 << (k - 1).bit_length()
    lines = max(1, ENTRIES // block)
    parts, unscaled = rows.new_empty(m, 2 * k, dtype=torch.float16), rows.new_empty(m)
    kernels.divide_rows[(-(-m // lines),)](rows, parts, unscaled, m, k, LINES=lines, BLOCK=block, num_warps=4)
    high, low, of_columns = halves(weight)
    out, tiles = rows.new_empty(m, n) if total is None else total, -(-m // TILE["BLOCK_M"]) * (n // TILE["BLOCK_N"])
    given, adds = (parts, high, low, unscaled, of_columns), total is not None
    kernels.product_of_halves[(tiles,)](*given, out, m, n, k, ADDS=adds, **TILE)
    return out


def _kernels(rows: Tensor, weight: Tensor) -> ModuleType | None:
    """Return the kernels, if they are worthwhile, need no gradient, and the device has the memory of a tile."""
    differentiated = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    if differentiated or not is_worthwhile(len(rows), weight):
        return None
    kernels = kernels_for(rows, weight, entries=rows.numel())
    return kernels if kernels is not None and _shared_memory(weight.device) > SHARED else None


@cache
def _shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def is_worthwhile(m: int, weight: Tensor) -> bool:
    """Return whether a product of m rows and a weight is large, and has whole tiles."""
    k, n = weight.shape
    fits = k % TILE["BLOCK_K"] == 0 == n % TILE["BLOCK_N"] and k <= LONGEST
    return weight.dtype == torch.float32 and fits and m * n * k >= LEAST_WORK


def halves(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both halves ``(k, n)`` of a weight, in order, whose columns are scaled, and what undoes that, ``(n,)``."""
    exponent = torch.frexp(weight.abs().amax(dim=0)).exponent.clamp(min=EXPONENT - MOST)
    scaled = weight.contiguous() * _power_of_two(EXPONENT - exponent)
    high = scaled.half()
    return high, (scaled - high.float()).half(), _power_of_two(exponent - EXPONENT)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return exactly 2 to the int32 ``exponent``, which torch's own powers miss by rounding on a GPU."""
    return ((exponent + MOST + 1) << 23).view(torch.float32)
