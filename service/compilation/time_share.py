"""Divides the time of a check, which is that of its ``timeout_s``, among its rungs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

_OF_RUNGS = 0.9
"""The part of ``timeout_s`` that is the rungs'; the rest is for diagnoses and the report."""


class GivenUpError(Exception):
    """A rung took longer than its share."""


@dataclass(frozen=True)
class TimeShare:
    """The moment of the monotonic clock at which all rungs must have ended; never, without a ``timeout_s``."""

    ends: float = math.inf

    @staticmethod
    def of(timeout_s: float | None) -> TimeShare:
        """Return the shares of a check that begins now."""
        return TimeShare(math.inf if timeout_s is None else time.monotonic() + _OF_RUNGS * timeout_s)

    def seconds(self, left: int) -> float:
        """Return the share of the next of ``left`` rungs: the last one leaves as much again."""
        return max(self.ends - time.monotonic(), 0.0) / (left + 1)


ENDLESS = TimeShare()


def given_up(name: str, seconds: float, place: str = "") -> str:
    """Return the sentence for a rung that was given up after so many seconds, at a line if one is known."""
    return f"{name} was given up after {seconds:.0f} s, its share of timeout_s{f', at {place}' if place else ''}"
