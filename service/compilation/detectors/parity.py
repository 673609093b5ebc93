"""Reports results that are further from the truth than eager's, and those of eager that differ too much to tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from service.compilation.run.observation import Observation
from service.compilation.run.parity import Comparison
from service.compilation.run.sampling import WHOLE
from service.compilation.verdicts import Finding


def detect(observation: Observation) -> Iterator[Finding]:
    """Yield a finding per kind of tensor, for the first iteration in which it went wrong. Noise is one only alone."""
    failed = [each for each in observation.comparisons if not (each.passed or each.is_noisy)]
    for comparison in _first(failed):
        yield Finding("fail_parity", f"{_place(comparison)}: {_how(comparison)}")
    if observation.draws:
        yield Finding("fail_parity", f"{observation.draws} is another than in eager, over many seeds")
    if not failed:
        noisy = [each for each in observation.comparisons if each.is_noisy]
        for comparison in _first(noisy):
            doubt = (
                f"two eager runs differ by {comparison.noise:.1%} of its size: errors of that size could not be seen"
            )
            yield Finding("vacuous", f"{_place(comparison)}: {doubt}")


def _first(comparisons: Iterable[Comparison]) -> Iterable[Comparison]:
    first: dict[str, Comparison] = {}
    for comparison in comparisons:
        kind = comparison.kind.removesuffix(WHOLE)
        if _earlier(comparison, first.get(kind)):
            first[kind] = comparison
    return first.values()


def _place(comparison: Comparison) -> str:
    return f"{comparison.kind} {comparison.name}, iteration {comparison.iteration}"


def _earlier(comparison: Comparison, other: Comparison | None) -> bool:
    return other is None or (comparison.iteration, -comparison.excess) < (other.iteration, -other.excess)


def _how(comparison: Comparison) -> str:
    if comparison.stale_by:
        before = f"{comparison.iteration} − {comparison.stale_by}"
        return (
            f"is the value of iteration {comparison.iteration - comparison.stale_by} ({before}), off by "
            f"{comparison.max_abs:.3g}: its memory was overwritten, or it was never written"
        )
    if comparison.note:
        return comparison.note
    times = "" if comparison.ratio is None else f", {comparison.ratio:.3g} times as far from float64 as eager"
    return f"off by {comparison.max_abs:.3g}{times}"
