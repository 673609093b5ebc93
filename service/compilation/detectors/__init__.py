"""Detectors: each looks at one observation for one way of not being safe. One file each, one line here."""

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
    """Return all that speaks against the rung; empty when it passed."""
    return tuple(finding for detector in DETECTORS for finding in detector(observation))
