"""Defines the verdicts on a rung in a phase, and combines those of several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal[
    "pass",
    "not_applicable",
    "not_reached",
    "timeout",
    "unstable",
    "fail_break",
    "fail_parity",
    "frozen",
    "vacuous",
    "fail_error",
    "fail_lifetime",
]
SEVERITY: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """A reason against trust in a rung; ``message`` is a sentence that names the place."""

    verdict: Verdict
    message: str


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe of ``verdicts``; ``pass`` when there are none."""
    return max(verdicts, key=SEVERITY.index, default="pass")
