"""How tests wait: for a condition, with a limit that only a broken program reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 300.0
"""Seconds that only a broken program takes, on however busy a machine."""
POLL_S = 0.02
T = TypeVar("T")


def eventually(condition: Callable[[], T | None], within_s: float = LIMIT_S) -> T:
    """Return the first result of ``condition`` that is true, or fail if there is none within ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"still {result!r} after {within_s} s"
        time.sleep(POLL_S)
    return result
