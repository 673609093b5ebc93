"""How tests wait: for a condition, with a limit that only a broken program reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 300.0
"""Seconds that only a broken program takes, on however busy a machine."""
POLL_S = 0.02
"""Seconds between two looks, at first."""
LONGEST_POLL_S = 0.15
T = TypeVar("T")


def eventually(condition: Callable[[], T | None], within_s: float = LIMIT_S) -> T:
    """Return the first result of ``condition`` that is true, or fail if there is none within ``within_s`` seconds."""
    began = time.monotonic()
    while True:
        looks = time.monotonic()
        if result := condition():
            return result
        waited, look_s = time.monotonic() - began, time.monotonic() - looks
        assert waited < within_s, f"still {result!r} after {within_s} s"
        # Looking takes processors from what is waited for: less often what takes long to see, or long to come.
        time.sleep(min(LONGEST_POLL_S, max(POLL_S, 3 * look_s, waited / 50)))
