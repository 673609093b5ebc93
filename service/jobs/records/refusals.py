"""Refusals: what is wrong with an input, and what stands in the way of a request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

LONGEST_TEXT = 1000
"""Characters of each text in a refusal: what was given may be of any length."""


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Return the text, or its first ``most`` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


@dataclass(frozen=True)
class Problem:
    """One reason to refuse an input: where, what, what was given and what would be accepted."""

    path: str
    message: str
    got: Any
    expected: str

    def shortened(self) -> Problem:
        """Return the problem with texts of at most :data:`LONGEST_TEXT` characters; a value that is longer as JSON
        becomes such a text.
        """
        try:
            got = json.dumps(self.got, default=str)
        except (ValueError, RecursionError):
            got = str(self.got)
        kept = self.got if len(got) <= LONGEST_TEXT else shortened(got)
        return Problem(shortened(self.path), shortened(self.message), kept, shortened(self.expected))


class Rejected(Exception):  # noqa: N818 - reads as the verdict it is
    """The input was refused; ``problems`` says why, field by field."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{problem.path}: {problem.message}" for problem in problems))
        self.problems = problems


class NotFound(Exception):  # noqa: N818
    """No such job, file, host, key or artifact."""


class Conflict(Exception):  # noqa: N818
    """The request contradicts the present state (an idempotency key reused, a running job deleted)."""


class OverQuota(Exception):  # noqa: N818
    """The project has as much as it may of something; the text says of what, how much, and by whom."""


class UnknownSpec(Exception):  # noqa: N818
    """A spec that was accepted once is not understood here: the job was claimed and can only be failed."""


class Superseded(Exception):  # noqa: N818
    """A write carried the number of an attempt that is no longer current."""
