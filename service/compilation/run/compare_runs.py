"""All tensors of a compiled run beside the reference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor

from service.compilation.run.parity import NOTHING_FINITE, Comparison, Oracle, compare
from service.compilation.run.reference import Reference, Run
from service.compilation.run.sampling import Key
from service.jobs.spec.compile import Tolerance

_KEPT_FAILURES = 5


def compare_runs(run: Run, reference: Reference, tolerance: Tolerance) -> Iterator[Comparison]:
    """Yield every tensor of every iteration; the updated parameters and buffers are iteration ``len(records)``."""
    for iteration in range(len(run.records) + 1):
        results, oracles = run.tensors(iteration), reference.oracles(iteration)
        for key in sorted(results.keys() | oracles.keys()):
            yield from _compare_one(key, iteration, results.get(key), oracles.get(key), tolerance)


def worth_keeping(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return of each kind the worst, and besides it the first failures."""
    by_kind: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        by_kind[comparison.kind].append(comparison)
    return tuple(kept for of_kind in by_kind.values() for kept in _of_kind(of_kind))


def kinds_of(comparisons: Iterable[Comparison]) -> frozenset[str]:
    """Return the kinds of which any number was compared: NaN beside NaN says nothing."""
    return frozenset(comparison.kind for comparison in comparisons if comparison.note != NOTHING_FINITE)


def _of_kind(comparisons: list[Comparison]) -> Iterator[Comparison]:
    worst = max(comparisons, key=lambda comparison: comparison.excess)
    yield worst
    yield from [each for each in comparisons if not each.passed and each is not worst][:_KEPT_FAILURES]


def _compare_one(
    key: Key, iteration: int, result: Tensor | None, oracle: Oracle | None, tolerance: Tolerance
) -> Iterator[Comparison]:
    if result is not None and oracle is not None:
        yield compare(key, iteration, result, oracle, tolerance)
    elif result is not None:
        yield Comparison(*key, iteration, math.inf, math.inf, None, "eager has no such tensor")
    elif not key[0].startswith("gradient"):  # a lost gradient is another defect than a wrong one
        yield Comparison(*key, iteration, math.inf, math.inf, None, "missing, where eager has one")
