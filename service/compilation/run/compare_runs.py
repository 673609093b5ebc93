"""Compares all tensors of a compiled run with the baseline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from service.compilation.run.baseline import Baseline
from service.compilation.run.copies import near
from service.compilation.run.oracles import Oracle
from service.compilation.run.parity import (
    NOTHING_FINITE,
    Comparison,
    Pairs,
    compare,
    compare_all,
    compare_running_on,
    equal,
)
from service.compilation.run.recorded_run import RecordedRun
from service.compilation.run.sampling import Key
from service.jobs.spec.compile import Tolerance

_KEPT_FAILURES = 5
GRADIENT = "gradient"


def compare_runs(run: RecordedRun, baseline: Baseline, tolerance: Tolerance) -> Iterator[Comparison]:
    """Yield every tensor of every iteration; the updated parameters and buffers are iteration ``len(records)``, and
    after them come the iterations that go on from each other.
    """
    for iteration, (results, oracles) in enumerate(zip(run.tensors, baseline.oracles, strict=True)):
        if iteration > len(run.records):
            yield from _compare_running_on(iteration, results, baseline, tolerance)
            continue
        found = _compare_iteration(iteration, results, oracles, baseline.device, tolerance)
        for key in sorted(found):
            yield _with_age(found[key], key, results.get(key), baseline, tolerance)


def _compare_running_on(
    iteration: int, results: Mapping[Key, Tensor], baseline: Baseline, tolerance: Tolerance
) -> Iterator[Comparison]:
    """Compare the results of both runs, as far as float64 says how far they may drift."""
    drift, oracles = baseline.drifts[iteration], baseline.oracles[iteration]
    if drift is None:
        return
    pairs = {
        key: (results[key], replace(oracles[key], drift=drift))
        for key in sorted(results.keys() & oracles.keys())
        if oracles[key].eager.is_floating_point()
    }
    for key, comparison in compare_running_on(_bring_near(pairs, baseline.device), iteration, tolerance).items():
        yield _with_age(comparison, key, results[key], baseline, tolerance)


def _with_age(
    comparison: Comparison, key: Key, result: Tensor | None, baseline: Baseline, tolerance: Tolerance
) -> Comparison:
    """Return a failed comparison with the earlier iteration whose value the tensor has, if there is one."""
    if comparison.passed or comparison.is_noisy or result is None:
        return comparison
    first = 0 if comparison.iteration < baseline.iterations else baseline.iterations + 1
    for earlier in range(comparison.iteration - 1, first - 1, -1):
        oracle = baseline.oracles[earlier].get(key)
        if oracle is not None and compare(key, earlier, result, oracle, tolerance).passed:
            return replace(comparison, stale_by=comparison.iteration - earlier)
    return comparison


def worth_keeping(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return the worst comparison of each kind, and the first few that failed."""
    by_kind: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        by_kind[comparison.kind].append(comparison)
    return tuple(kept for of_kind in by_kind.values() for kept in _of_kind(of_kind))


def kinds_of(comparisons: Iterable[Comparison]) -> frozenset[str]:
    """Return the kinds with any compared number: NaN beside NaN proves nothing."""
    return frozenset(comparison.kind for comparison in comparisons if comparison.note != NOTHING_FINITE)


def _of_kind(comparisons: list[Comparison]) -> Iterator[Comparison]:
    worst = max(comparisons, key=lambda comparison: comparison.excess)
    yield worst
    yield from [each for each in comparisons if not each.passed and each is not worst][:_KEPT_FAILURES]


def _bring_near(pairs: Pairs, device: torch.device) -> Pairs:
    """Return them on the device that compares them faster."""
    results = near({key: result for key, (result, _) in pairs.items()}, device)
    eager = near({key: oracle.eager for key, (_, oracle) in pairs.items()}, device)
    truth = near({key: oracle.truth for key, (_, oracle) in pairs.items() if oracle.truth is not None}, device)
    return {
        key: (results[key], replace(oracle, eager=eager[key], truth=truth.get(key)))
        for key, (_, oracle) in pairs.items()
    }


def _compare_iteration(
    iteration: int,
    results: Mapping[Key, Tensor],
    oracles: Mapping[Key, Oracle],
    device: torch.device,
    tolerance: Tolerance,
) -> dict[Key, Comparison]:
    found: dict[Key, Comparison] = {}
    differ: dict[Key, tuple[Tensor, Oracle]] = {}
    for key in sorted(results.keys() | oracles.keys()):
        result, oracle = results.get(key), oracles.get(key)
        if result is None or oracle is None:
            comparison = _compare_lone(key, iteration, result)
        elif (comparison := equal(key, iteration, result, oracle)) is None:
            differ[key] = result, oracle
        if comparison is not None:
            found[key] = comparison
    return found | compare_all(_bring_near(differ, device), iteration, tolerance)


def _compare_lone(key: Key, iteration: int, result: Tensor | None) -> Comparison | None:
    """Judge a ``result`` that eager lacks, or a missing one that eager has."""
    is_gradient = key[0].startswith(GRADIENT)
    if result is None:  # a lost gradient is a different defect from a wrong one
        lacking = "missing, where eager has one"
        return None if is_gradient else Comparison(*key, iteration, math.inf, math.inf, None, lacking)
    if is_gradient and not result.any():  # its update shows the effect
        return Comparison(*key, iteration, 0.0, 0.0, note="zero, where eager has none")
    return Comparison(*key, iteration, math.inf, math.inf, None, "eager has no such tensor")
