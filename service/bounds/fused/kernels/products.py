"""Propagates coefficients of products of two bounded values."""

from __future__ import annotations

import triton
import triton.language as tl

from service.bounds.fused.kernels.places import entries_from, row_of_program


@triton.jit
def _planes(positive, place, x_low, x_high, y_low, y_high):
    """Return the plane at ``place`` between a product's two: its slopes along x and y, its constant."""
    near = tl.where(positive, y_low, y_high)
    far = tl.where(positive, y_high, y_low)
    along_x = near + place * (far - near)
    along_y = x_low + place * (x_high - x_low)
    first, last = -x_low * near, -x_high * far
    return along_x, along_y, first + place * (last - first)


@triton.jit
def _change_by_place(positive, onto_x, onto_y, onto_constant, x_low, x_high, y_low, y_high):
    """Return how what ``_planes`` gives, times its gradients, changes along the place."""
    rises = tl.where(positive, y_high - y_low, y_low - y_high)
    change = tl.where(positive, x_low * y_low - x_high * y_high, x_low * y_high - x_high * y_low)
    return onto_x * rises + onto_y * (x_high - x_low) + onto_constant * change


@triton.jit
def _load_ends(low, high, at, here):
    return tl.load(low + at, here, 0.0), tl.load(high + at, here, 0.0)


@triton.jit
def _load_matrices(x_low, x_high, x_at, x_here, y_low, y_high, y_at, y_here):
    """Return the ends of both factors, ``(height, inner, 1)`` and ``(1, inner, width)``."""
    lx, ux = _load_ends(x_low, x_high, x_at, x_here)
    ly, uy = _load_ends(y_low, y_high, y_at, y_here)
    return lx[:, :, None], ux[:, :, None], ly[None, :, :], uy[None, :, :]


@triton.jit
def _places_in_matrix(i, j, height, width):
    """Return the places of rows ``i`` and columns ``j`` in a matrix, and which of them it has."""
    return i[:, None] * width + j[None, :], (i < height)[:, None] & (j < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def forward_products(
    a, places, x_low, x_high, y_low, y_high, to_x, to_y, bias, n, rows, a_batch, a_row, BLOCK: tl.constexpr
):
    """Lead coefficients through products entry by entry; bounds are ``(batch, n)``, places ``(batch, rows, n)``."""
    program, instance, row = row_of_program(rows)
    total = tl.zeros([BLOCK], dtype=to_x.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        c = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        lx, ux = _load_ends(x_low, x_high, instance * n + j, here)
        ly, uy = _load_ends(y_low, y_high, instance * n + j, here)
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
    program, instance, row = row_of_program(rows)
    gradient = tl.load(onto_bias + program)
    for first in range(0, n, BLOCK):
        j, here = entries_from(first, n, BLOCK)
        c = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        lx, ux = _load_ends(x_low, x_high, instance * n + j, here)
        ly, uy = _load_ends(y_low, y_high, instance * n + j, here)
        gx, gy = tl.load(onto_x + program * n + j, here, 0.0), tl.load(onto_y + program * n + j, here, 0.0)
        onto_place = c * _change_by_place(c > 0, gx, gy, gradient, lx, ux, ly, uy)
        tl.store(to_places + program * n + j, onto_place, here)
        if TO_A:
            along_x, along_y, constant = _planes(c > 0, place, lx, ux, ly, uy)
            tl.store(to_a + program * n + j, gx * along_x + gy * along_y + gradient * constant, here)


@triton.jit(do_not_specialize=["rows", "heads", "height", "inner", "width"])
def forward_matrices(
    a, places, x_low, x_high, y_low, y_high, to_x, to_y, bias, rows, heads, height, inner, width, a_batch, a_row,
    HEIGHT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lead coefficients ``(…, heads, height, width)`` through products of matrices, of ``(height, inner)`` by ``(inner,
    width)``.

    A program works on one head of one row; ``places`` are ``(batch, rows, heads, height, inner, width)``.
    """
    program, line, head = row_of_program(heads)
    instance, row = line // rows, line % rows
    i, k, j = tl.arange(0, HEIGHT), tl.arange(0, INNER), tl.arange(0, WIDTH)
    entries, c_here = _places_in_matrix(i, j, height, width)
    x_at, x_here = _places_in_matrix(i, k, height, inner)
    y_at, y_here = _places_in_matrix(k, j, inner, width)
    c = tl.load(a + instance * a_batch + row * a_row + head * height * width + entries, c_here, 0.0)[:, None, :]
    matrix = instance * heads + head
    lx, ux, ly, uy = _load_matrices(
        x_low, x_high, matrix * height * inner + x_at, x_here, y_low, y_high, matrix * inner * width + y_at, y_here
    )
    terms = x_at[:, :, None] * width + j[None, None, :]
    here = x_here[:, :, None] & (j < width)[None, None, :]
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
    program, line, head = row_of_program(heads)
    instance, row = line // rows, line % rows
    i, k, j = tl.arange(0, HEIGHT), tl.arange(0, INNER), tl.arange(0, WIDTH)
    entries, c_here = _places_in_matrix(i, j, height, width)
    x_at, x_here = _places_in_matrix(i, k, height, inner)
    y_at, y_here = _places_in_matrix(k, j, inner, width)
    c = tl.load(a + instance * a_batch + row * a_row + head * height * width + entries, c_here, 0.0)[:, None, :]
    matrix = instance * heads + head
    lx, ux, ly, uy = _load_matrices(
        x_low, x_high, matrix * height * inner + x_at, x_here, y_low, y_high, matrix * inner * width + y_at, y_here
    )
    gx = tl.load(onto_x + program * height * inner + x_at, x_here, 0.0)[:, :, None]
    gy = tl.load(onto_y + program * inner * width + y_at, y_here, 0.0)[None, :, :]
    gradient = tl.load(onto_bias + line)
    terms = x_at[:, :, None] * width + j[None, None, :]
    here = x_here[:, :, None] & (j < width)[None, None, :]
    onto_place = c * _change_by_place(c > 0, gx, gy, gradient, lx, ux, ly, uy)
    tl.store(to_places + program * height * inner * width + terms, onto_place, here)
    if TO_A:
        place = tl.load(places + program * height * inner * width + terms, here, 0.0)
        along_x, along_y, constant = _planes(c > 0, place, lx, ux, ly, uy)
        onto = tl.sum(gx * along_x + gy * along_y + gradient * constant, 1)
        tl.store(to_a + program * height * width + entries, onto, c_here)
