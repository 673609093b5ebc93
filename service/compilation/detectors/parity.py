"""Results are further from the truth than eager's."""

from __future__ import annotations

from collections.abc import Iterator

from service.compilation.observation import Observation
from service.compilation.parity import Comparison
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    """One finding per kind of tensor, for the first iteration in which it went wrong."""
    first: dict[str, Comparison] = {}
    for comparison in observation.comparisons:
        if not comparison.passed and _earlier(comparison, first.get(comparison.kind)):
            first[comparison.kind] = comparison
    for kind, comparison in first.items():
        yield Finding("fail_parity", f"{kind} {comparison.name}, iteration {comparison.iteration}: {_how(comparison)}")


def _earlier(comparison: Comparison, other: Comparison | None) -> bool:
    return other is None or (comparison.iteration, -comparison.excess) < (other.iteration, -other.excess)


def _how(comparison: Comparison) -> str:
    if comparison.note:
        return comparison.note
    times = "" if comparison.ratio is None else f", {comparison.ratio:.3g} times as far from float64 as eager"
    return f"off by {comparison.max_abs:.3g}{times}"
