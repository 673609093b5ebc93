"""The kernels themselves, in Triton. One program works on one row of coefficients, ``n`` entries in blocks.

Pointers come with the strides of batch and row; a stride of 0 repeats. Entries of a row are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ones(out, BLOCK: tl.constexpr):
    """The least kernel there is: whether kernels can be built here."""
    tl.store(out + tl.arange(0, BLOCK), 1.0)


@triton.jit
def _start(a, index, a_batch, a_row, index_batch, instance, row, n, pairs, INDEXED: tl.constexpr):
    """Where a row begins and its sign. Indexed rows are rows of a matrix, and the same again negated."""
    if INDEXED:
        picked = tl.load(index + instance * index_batch + row % pairs)
        return a + picked * n, tl.where(row < pairs, 1.0, -1.0)
    return a + instance * a_batch + row * a_row, 1.0


@triton.jit
def _lower_slope(slope, free, codes, lines, j, here, flattest, instance, row_free, n, FREE: tl.constexpr):
    """The fixed slope, or the free one where a code is that of an open entry: see ``forward_lines``."""
    fixed = tl.load(slope + lines + j, here, 0.0)
    if FREE:
        code = tl.load(codes + instance * n + j, here, -1)
        open_ = code >= 0
        chosen = tl.load(free + row_free + code, here & open_, 0.0)
        return tl.where(open_, flattest + (1 - flattest) * chosen, fixed), code
    return fixed, j


@triton.jit
def forward_lines(
    a,
    index,
    lower,
    upper,
    below,
    above,
    free,
    codes,
    out,
    bias,
    n,
    rows,
    pairs,
    frees,
    flattest,
    a_batch,
    a_row,
    index_batch,
    lower_batch,
    lower_row,
    upper_batch,
    upper_row,
    below_batch,
    below_row,
    above_batch,
    above_row,
    INDEXED: tl.constexpr,
    FREE: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Coefficients through lines: slopes ``lower``, ``upper``, intercepts ``below``, ``above``.

    With FREE a lower slope is that of ``free`` ``(batch, rows, frees)`` where ``codes`` ``(batch, n)`` is 0 or more:
    there. A code of −2 − k marks an entry that is not open although place k is its own; −1 has none.
    """
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    begin, sign = _start(a, index, a_batch, a_row, index_batch, instance, row, n, pairs, INDEXED)
    lower_at = instance * lower_batch + row * lower_row
    upper_at = upper + instance * upper_batch + row * upper_row
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        x = tl.load(begin + j, here, 0.0)
        if INDEXED:
            x = (x * sign).to(out.dtype.element_ty)
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


@triton.jit
def backward_lines(
    a,
    index,
    lower,
    upper,
    below,
    above,
    free,
    codes,
    onto,
    onto_bias,
    to_a,
    to_lower,
    to_upper,
    to_below,
    to_above,
    to_free,
    n,
    rows,
    pairs,
    frees,
    flattest,
    a_batch,
    a_row,
    index_batch,
    lower_batch,
    lower_row,
    upper_batch,
    upper_row,
    below_batch,
    below_row,
    above_batch,
    above_row,
    INDEXED: tl.constexpr,
    FREE: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    TO_A: tl.constexpr,
    TO_LOWER: tl.constexpr,
    TO_UPPER: tl.constexpr,
    TO_BELOW: tl.constexpr,
    TO_ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of ``forward_lines``, from those onto its coefficients and its bias."""
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    begin, sign = _start(a, index, a_batch, a_row, index_batch, instance, row, n, pairs, INDEXED)
    lower_at = instance * lower_batch + row * lower_row
    upper_at = upper + instance * upper_batch + row * upper_row
    if BELOW or ABOVE:
        constant_gradient = tl.load(onto_bias + program)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        x = tl.load(begin + j, here, 0.0)
        if INDEXED:
            x = (x * sign).to(onto.dtype.element_ty)
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


@triton.jit
def forward_least(a, centre, radius, out, n, rows, a_batch, a_row, BLOCK: tl.constexpr):
    """``Σ a·centre − |a|·radius`` of each row; centre and radius are ``(batch, n)``."""
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    begin = a + instance * a_batch + row * a_row
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        x = tl.load(begin + j, here, 0.0)
        total += x * tl.load(centre + instance * n + j, here, 0.0)
        total -= tl.abs(x) * tl.load(radius + instance * n + j, here, 0.0)
    tl.store(out + program, tl.sum(total, 0))


@triton.jit
def backward_least(a, centre, radius, onto, to_a, n, rows, a_batch, a_row, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    begin = a + instance * a_batch + row * a_row
    gradient = tl.load(onto + program)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        x = tl.load(begin + j, here, 0.0)
        middle = tl.load(centre + instance * n + j, here, 0.0)
        spread = tl.load(radius + instance * n + j, here, 0.0)
        towards = tl.where(x > 0, middle - spread, tl.where(x < 0, middle + spread, middle))
        tl.store(to_a + program * n + j, (gradient * towards).to(onto.dtype.element_ty), here)


@triton.jit
def adam(place, gradient, mean, square, steps, count, rate, decay_log, BLOCK: tl.constexpr):
    """A step of Adam (Kingma and Ba, 2015) down the gradient, kept within 0 and 1; ``steps`` made before this one."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = j < count
    step = tl.load(steps) + 1
    g = tl.load(gradient + j, here, 0.0)
    g = tl.where(tl.abs(g) < float("inf"), g, 0.0)
    m = 0.9 * tl.load(mean + j, here, 0.0) + 0.1 * g
    v = 0.999 * tl.load(square + j, here, 0.0) + 0.001 * g * g
    tl.store(mean + j, m.to(mean.dtype.element_ty), here)
    tl.store(square + j, v.to(square.dtype.element_ty), here)
    # ln 0.9 and ln 0.999
    first, second = 1 - tl.exp(step * -0.10536051565782628), 1 - tl.exp(step * -0.0010005003335835335)
    speed = rate * tl.exp((step - 1) * decay_log) / first
    moved = tl.load(place + j, here, 0.0) - speed * m / (tl.sqrt(v / second) + 1e-8)
    tl.store(place + j, tl.minimum(tl.maximum(moved, 0.0), 1.0).to(place.dtype.element_ty), here)


@triton.jit
def rough_product(
    a, b, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """``a`` ``(m, k)`` times the transpose of ``b`` ``(n, k)``, factors rounded to TF32."""
    program = tl.program_id(0)
    across = tl.cdiv(n, BLOCK_N)
    group = program // (GROUP * across)
    height = min(tl.cdiv(m, BLOCK_M) - group * GROUP, GROUP)
    down = group * GROUP + (program % (GROUP * across)) % height
    right = (program % (GROUP * across)) // height
    i = down.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = right * BLOCK_N + tl.arange(0, BLOCK_N)
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
def _table_line(slopes, intercepts, place, x, j, here, instance, n, lines):
    """The line at a place of a table ``(batch, 2·lines, n)``, and how fast it changes there."""
    scaled = place * (lines - 1)
    line = tl.minimum(tl.maximum(tl.floor(scaled), 0.0), lines - 2)
    beyond = scaled - line
    at = (instance * 2 * lines + line.to(tl.int64) + tl.where(x < 0, lines, 0)) * n + j
    slope, intercept = tl.load(slopes + at, here, 0.0), tl.load(intercepts + at, here, 0.0)
    steeper = tl.load(slopes + at + n, here, 0.0) - slope
    higher = tl.load(intercepts + at + n, here, 0.0) - intercept
    steeper = tl.where(tl.abs(steeper) < float("inf"), steeper, 0.0)
    higher = tl.where(tl.abs(higher) < float("inf"), higher, 0.0)
    return slope + beyond * steeper, intercept + beyond * higher, steeper * (lines - 1), higher * (lines - 1)


@triton.jit
def forward_table(a, places, slopes, intercepts, out, bias, n, rows, lines, a_batch, a_row, BLOCK: tl.constexpr):
    """Coefficients through the lines at ``places`` ``(batch, rows, n)``."""
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        x = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        slope, intercept, _, _ = _table_line(slopes, intercepts, place, x, j, here, instance, n, lines)
        tl.store(out + program * n + j, x * slope, here)
        total += x * intercept
    tl.store(bias + program, tl.sum(total, 0))


@triton.jit
def backward_table(
    a, places, slopes, intercepts, onto, onto_bias, to_a, to_places, n, rows, lines, a_batch, a_row,
    TO_A: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    constant = tl.load(onto_bias + program)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = j < n
        x = tl.load(a + instance * a_batch + row * a_row + j, here, 0.0)
        place = tl.load(places + program * n + j, here, 0.0)
        gradient = tl.load(onto + program * n + j, here, 0.0)
        slope, intercept, steeper, higher = _table_line(slopes, intercepts, place, x, j, here, instance, n, lines)
        tl.store(to_places + program * n + j, x * (gradient * steeper + constant * higher), here)
        if TO_A:
            tl.store(to_a + program * n + j, gradient * slope + constant * intercept, here)


@triton.jit
def _planes(positive, place, x_low, x_high, y_low, y_high):
    """The plane at ``place`` between a product's two: its slopes along x and y, its constant."""
    near = tl.where(positive, y_low, y_high)
    far = tl.where(positive, y_high, y_low)
    along_x = near + place * (far - near)
    along_y = x_low + place * (x_high - x_low)
    first, last = -x_low * near, -x_high * far
    return along_x, along_y, first + place * (last - first)


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
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


@triton.jit
def _shown(e, here, instance, down, across, channels, tall, broad, height, width):
    """Where entries ``e`` of a window ``(channels, height, width)`` are in its image, and which are."""
    channel, rest = e // (height * width), e % (height * width)
    y, x = down + rest // width, across + rest % width
    inside = here & (y >= 0) & (y < tall) & (x >= 0) & (x < broad)
    return ((instance * channels + channel) * tall + y) * broad + x, inside


@triton.jit
def lines_in_windows(
    a, place, lower, upper, below, above, out, bias, rows, channels, tall, broad, height, width,
    a_batch, a_row, place_batch, stride_down, stride_across, offset_down, offset_across,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``forward_lines`` of what windows show of lines over images ``(batch, channels, tall, broad)``, 0 outside.

    ``place`` is ``(batch or 1, rows, 2)``, to be multiplied and moved to get a window's upper left corner.
    """
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    n = channels * height * width
    corner = place + instance * place_batch + row * 2
    down = (tl.load(corner) * stride_down + offset_down).to(tl.int32)
    across = (tl.load(corner + 1) * stride_across + offset_across).to(tl.int32)
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        e = first + tl.arange(0, BLOCK)
        here = e < n
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


@triton.jit
def least_in_windows(
    a, place, lower, upper, out, rows, channels, tall, broad, height, width,
    a_batch, a_row, place_batch, stride_down, stride_across, offset_down, offset_across, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least value of each row's window over boxes of images; see ``lines_in_windows``."""
    program = tl.program_id(0).to(tl.int64)
    instance, row = program // rows, program % rows
    n = channels * height * width
    corner = place + instance * place_batch + row * 2
    down = (tl.load(corner) * stride_down + offset_down).to(tl.int32)
    across = (tl.load(corner + 1) * stride_across + offset_across).to(tl.int32)
    total = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    for first in range(0, n, BLOCK):
        e = first + tl.arange(0, BLOCK)
        here = e < n
        at, inside = _shown(e, here, instance, down, across, channels, tall, broad, height, width)
        x = tl.load(a + instance * a_batch + row * a_row + e, here, 0.0)
        low, high = tl.load(lower + at, inside, 0.0) / 2, tl.load(upper + at, inside, 0.0) / 2
        total += x * (low + high) - tl.abs(x) * (high - low)
    tl.store(out + program, tl.sum(total, 0))


@triton.jit
def adjoint_convolution(
    a, weight, out, images, outer, height, width, channels, tall, broad,
    pad_down, pad_across, phases_tall, phases_broad,
    KERNEL_DOWN: tl.constexpr, KERNEL_ACROSS: tl.constexpr, STRIDE_DOWN: tl.constexpr, STRIDE_ACROSS: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, OUTER: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The adjoint of a convolution with ``weight`` ``(outer, channels, kernel…)``, in full precision.

    From ``a`` ``(images, outer, height, width)`` to ``out`` ``(images, channels, tall, broad)``. A program works on
    entries whose places are alike modulo the strides, so that the same entries of the kernel meet all of them.
    """
    p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    phase_down, phase_across = tl.program_id(1) // STRIDE_ACROSS, tl.program_id(1) % STRIDE_ACROSS
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    image, rest = p // (phases_tall * phases_broad), (p % (phases_tall * phases_broad)).to(tl.int32)
    y = rest // phases_broad * STRIDE_DOWN + phase_down
    x = rest % phases_broad * STRIDE_ACROSS + phase_across
    here = (image < images) & (y < tall) & (x < broad)
    first_down, first_across = (phase_down + pad_down) % STRIDE_DOWN, (phase_across + pad_across) % STRIDE_ACROSS
    k = tl.arange(0, OUTER)
    total = tl.zeros((CHANNELS, PIXELS), dtype=tl.float32)
    for down in tl.static_range(0, KERNEL_DOWN, STRIDE_DOWN):
        for across in tl.static_range(0, KERNEL_ACROSS, STRIDE_ACROSS):
            ky, kx = first_down + down, first_across + across
            above, left = (y + pad_down - ky) // STRIDE_DOWN, (x + pad_across - kx) // STRIDE_ACROSS
            met = here & (y + pad_down >= ky) & (above < height) & (x + pad_across >= kx) & (left < width)
            met = met & (ky < KERNEL_DOWN) & (kx < KERNEL_ACROSS)
            source = a + image * outer * height * width + above * width + left
            entry = weight + (c * KERNEL_DOWN + ky) * KERNEL_ACROSS + kx
            step = channels * KERNEL_DOWN * KERNEL_ACROSS
            known = (c < channels) & (ky < KERNEL_DOWN) & (kx < KERNEL_ACROSS)
            if MODE == 2:
                for o in range(outer):
                    given = tl.load(source + o * height * width, met, 0.0)
                    factor = tl.load(entry + o * step, known, 0.0)
                    total += factor[:, None] * given[None, :]
            else:
                for begin in range(0, outer, OUTER):
                    o = begin + k
                    given = tl.load(
                        source[None, :] + (o * height * width)[:, None], met[None, :] & (o < outer)[:, None], 0.0
                    )
                    factor = tl.load(entry[:, None] + (o * step)[None, :], known[:, None] & (o < outer)[None, :], 0.0)
                    if MODE == 0:
                        total = tl.dot(factor, given, total, input_precision="ieee")
                    else:
                        total = tl.dot(factor, given, total, input_precision="tf32x3")
    place = out + (image * channels * tall + y) * broad + x
    tl.store(place[None, :] + (c * tall * broad)[:, None], total, here[None, :] & (c < channels)[:, None])
