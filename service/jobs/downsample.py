"""Thinning a series for display without losing what the eye looks for: the first, the last, every extreme."""

from __future__ import annotations

import math
from collections.abc import Sequence


def downsample(values: Sequence[float | None], max_points: int) -> list[int]:
    """Return indices to keep, ascending, at most ``max_points`` of them: the first, the last, and the least and
    greatest of equal stretches between (so also those of the whole series). A short series is kept whole.

    What is not a finite number is kept only at the ends, and in a stretch that holds nothing else.
    Raises ``ValueError`` for ``max_points < 4``, which cannot hold both ends and both extremes.
    """
    if max_points < 4:
        raise ValueError(f"max_points is {max_points}; expected 4 or more (both ends and both extremes)")
    count = len(values)
    if count <= max_points:
        return list(range(count))
    stretches = (max_points - 2) // 2
    inner = count - 2
    kept = [0]
    for stretch in range(stretches):
        start, end = 1 + inner * stretch // stretches, 1 + inner * (stretch + 1) // stretches
        kept += _extremes(values, start, end)
    return [*kept, count - 1]


def _extremes(values: Sequence[float | None], start: int, end: int) -> list[int]:
    """Return one or two indices of ``start … end-1``, ascending."""
    finite = [
        (value, index) for index in range(start, end) if (value := values[index]) is not None and math.isfinite(value)
    ]
    if not finite:
        return [start]
    return sorted({min(finite)[1], max(finite)[1]})
