"""Propagates coefficients of products of two bounded values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _planes(positive, place, x_low, x_high, y_low, y_high):
    """Return the plane at ``place`` between a product's two: its slopes along x and y, its constant."""
    near = tl.where(positive, y_low, y_high)
    far = tl.where(positive, y_high, y_low)
    along_x = near + place * (far - near)
    along_y = x_low + place * (x_high - x_low)
    first, last = -x_low * near, -x_high * far
    return along_x, along_y, first + place * (last - first)


@triton.jit(do_not_specialize=["rows"])
def forward_products(
    a, places, x_low, x_high, y_low, y_high, to_x, to_y, bias, n, rows, a_batch, a_row, BLOCK: tl.constexpr
):
    """Coefficients of products entry by entry; bounds are ``(batch, n)``, places ``(batch, rows, n)``."""
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    total = tl.zeros([BLOCK], dtype=to_x.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        c = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        at = instance * n + j
        lx, ux = tl.load(x_low + at, here, 0.0), tl.load(x_high + at, here, 0.0)
        ly, uy = tl.load(y_low + at, here, 0.0), tl.load(y_high + at, here, 0.0)
        along_x, along_y, constant = _planes(c > 0, place, lx, ux, ly, uy)
        tl.store(to_x + program * n + j, c * along_x, here)
        tl.store(to_y + program * n + j, c * along_y, here)
        total += c * constant
    tl.store(bias + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows"])
def backward_products(
    a, places, x_low, x_high, y_low, y_high, onto_x, onto_y, onto_bias, to_a, to_places, n, rows, a_batch, a_row,
    TO_A: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    gradient = tl.load(onto_bias + program)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        c = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        at = instance * n + j
        lx, ux = tl.load(x_low + at, here, 0.0), tl.load(x_high + at, here, 0.0)
        ly, uy = tl.load(y_low + at, here, 0.0), tl.load(y_high + at, here, 0.0)
        gx, gy = tl.load(onto_x + program * n + j, here, 0.0), tl.load(onto_y + program * n + j, here, 0.0)
        positive = c > 0
        rises = tl.where(positive, uy - ly, ly - uy)
        change = tl.where(positive, lx * ly - ux * uy, lx * uy - ux * ly)
        tl.store(to_places + program * n + j, c * (gx * rises + gy * (ux - lx) + gradient * change), here)
        if TO_A:
            along_x, along_y, constant = _planes(positive, place, lx, ux, ly, uy)
            tl.store(to_a + program * n + j, gx * along_x + gy * along_y + gradient * constant, here)


@triton.jit(do_not_specialize=["rows", "heads", "height", "inner", "width"])
def forward_matrices(
    a, places, x_low, x_high, y_low, y_high, to_x, to_y, bias, rows, heads, height, inner, width, a_batch, a_row,
    HEIGHT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Coefficients ``(…, heads, height, width)`` of products of matrices ``(height, inner)`` and ``(inner, width)``.

    A program works on one head of one row; ``places`` are ``(batch, rows, heads, height, inner, width)``.
    """
    program = tl.program_id(0).to(tl.int64)
    line, head = program // heads, program % heads
    instance, row = line // rows, line % rows
    i, k, j = tl.arange(0, HEIGHT), tl.arange(0, INNER), tl.arange(0, WIDTH)
    own, left, right = i < height, k < inner, j < width
    entries = i[:, None] * width + j[None, :]
    c_here = own[:, None] & right[None, :]
    c = tl.load(a + instance * a_batch + row * a_row + head * height * width + entries, c_here, 0.0)[:, None, :]
    x_at, x_here = i[:, None] * inner + k[None, :], own[:, None] & left[None, :]
    y_at, y_here = k[:, None] * width + j[None, :], left[:, None] & right[None, :]
    x_from, y_from = (instance * heads + head) * height * inner, (instance * heads + head) * inner * width
    lx = tl.load(x_low + x_from + x_at, x_here, 0.0)[:, :, None]
    ux = tl.load(x_high + x_from + x_at, x_here, 0.0)[:, :, None]
    ly = tl.load(y_low + y_from + y_at, y_here, 0.0)[None, :, :]
    uy = tl.load(y_high + y_from + y_at, y_here, 0.0)[None, :, :]
    terms = (i[:, None, None] * inner + k[None, :, None]) * width + j[None, None, :]
    here = own[:, None, None] & left[None, :, None] & right[None, None, :]
    place = tl.load(places + program * height * inner * width + terms, here, 0.0)
    along_x, along_y, constant = _planes(c > 0, place, lx, ux, ly, uy)
    tl.store(to_x + program * height * inner + x_at, tl.sum(c * along_x, 2), x_here)
    tl.store(to_y + program * inner * width + y_at, tl.sum(c * along_y, 0), y_here)
    tl.store(bias + program, tl.sum(tl.sum(tl.sum(c * constant, 2), 1), 0))


@triton.jit(do_not_specialize=["rows", "heads", "height", "inner", "width"])
def backward_matrices(
    a, places, x_low, x_high, y_low, y_high, onto_x, onto_y, onto_bias, to_a, to_places,
    rows, heads, height, inner, width, a_batch, a_row,
    TO_A: tl.constexpr, HEIGHT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    line, head = program // heads, program % heads
    instance, row = line // rows, line % rows
    i, k, j = tl.arange(0, HEIGHT), tl.arange(0, INNER), tl.arange(0, WIDTH)
    own, left, right = i < height, k < inner, j < width
    entries = i[:, None] * width + j[None, :]
    c_here = own[:, None] & right[None, :]
    c = tl.load(a + instance * a_batch + row * a_row + head * height * width + entries, c_here, 0.0)[:, None, :]
    x_at, x_here = i[:, None] * inner + k[None, :], own[:, None] & left[None, :]
    y_at, y_here = k[:, None] * width + j[None, :], left[:, None] & right[None, :]
    x_from, y_from = (instance * heads + head) * height * inner, (instance * heads + head) * inner * width
    lx = tl.load(x_low + x_from + x_at, x_here, 0.0)[:, :, None]
    ux = tl.load(x_high + x_from + x_at, x_here, 0.0)[:, :, None]
    ly = tl.load(y_low + y_from + y_at, y_here, 0.0)[None, :, :]
    uy = tl.load(y_high + y_from + y_at, y_here, 0.0)[None, :, :]
    gx = tl.load(onto_x + program * height * inner + x_at, x_here, 0.0)[:, :, None]
    gy = tl.load(onto_y + program * inner * width + y_at, y_here, 0.0)[None, :, :]
    gradient = tl.load(onto_bias + line)
    terms = (i[:, None, None] * inner + k[None, :, None]) * width + j[None, None, :]
    here = own[:, None, None] & left[None, :, None] & right[None, None, :]
    positive = c > 0
    rises = tl.where(positive, uy - ly, ly - uy)
    change = tl.where(positive, lx * ly - ux * uy, lx * uy - ux * ly)
    found = c * (gx * rises + gy * (ux - lx) + gradient * change)
    tl.store(to_places + program * height * inner * width + terms, found, here)
    if TO_A:
        place = tl.load(places + program * height * inner * width + terms, here, 0.0)
        along_x, along_y, constant = _planes(positive, place, lx, ux, ly, uy)
        onto = tl.sum(gx * along_x + gy * along_y + gradient * constant, 1)
        tl.store(to_a + program * height * width + entries, onto, c_here)
