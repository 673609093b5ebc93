"""Finds the place of a program's work."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of_program(rows):
    """Return the number of the program, and the instance and the row that it works on."""
    program = tl.program_id(0).to(tl.int64)
    return program, program // rows, program % rows


@triton.jit
def entries_from(first, n, BLOCK: tl.constexpr):
    """Return the entries of a block, and which of them there are."""
    j = first + tl.arange(0, BLOCK)
    return j, j < n
