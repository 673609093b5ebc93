"""Lists the detectors: each searches one observation for one kind of fault. One file each, one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from service.compilation.detectors import error, frozen, lifetime, parity, shapes, uncalled, unseen, unstable, vacuous
from service.compilation.run.observation import Observation
from service.compilation.verdicts import Finding

Detector = Callable[[Observation], Iterable[Finding]]

DETECTORS: tuple[Detector, ...] = (
    error.detect,
    lifetime.detect,
    uncalled.detect,
    vacuous.detect,
    frozen.detect,
    parity.detect,
    unstable.detect,
    shapes.detect,
    unseen.detect,
)


def judge(observation: Observation) -> tuple[Finding, ...]:
    """Return all findings against the rung; empty if it passed."""
    return tuple(finding for detector in DETECTORS for finding in detector(observation))
