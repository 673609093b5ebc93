"""Defines what can be said of a rung in a phase, and how the words of several ranks become one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal[
    "pass",
    "not_applicable",
    "not_reached",
    "unstable",
    "fail_parity",
    "frozen",
    "vacuous",
    "fail_error",
    "fail_lifetime",
]
SEVERITY: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """A reason not to trust a rung; ``message`` is a sentence that names the place."""

    verdict: Verdict
    message: str


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe of ``verdicts``; ``pass`` when there are none."""
    return max(verdicts, key=SEVERITY.index, default="pass")
