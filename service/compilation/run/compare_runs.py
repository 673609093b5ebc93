"""Compares all tensors of a compiled run with the baseline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from service.compilation.run.baseline import Baseline
from service.compilation.run.oracles import Oracle, near
from service.compilation.run.parity import NOTHING_FINITE, Comparison, compare, compare_running_on, equal
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
        for key in sorted(results.keys() | oracles.keys()):
            pair = (results.get(key), oracles.get(key))
            for comparison in _compare_one(key, iteration, pair, tolerance, baseline.device):
                yield _with_age(comparison, key, results.get(key), baseline, tolerance)


def _compare_running_on(
    iteration: int, results: Mapping[Key, Tensor], baseline: Baseline, tolerance: Tolerance
) -> Iterator[Comparison]:
    """Compare the results of both runs, as far as float64 says how far they may drift."""
    drift, oracles = baseline.drifts[iteration], baseline.oracles[iteration]
    if drift is None:
        return
    for key in sorted(results.keys() & oracles.keys()):
        if oracles[key].eager.is_floating_point():
            result, oracle = _bring_near(results[key], replace(oracles[key], drift=drift), baseline.device)
            comparison = compare_running_on(key, iteration, result, oracle, tolerance)
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


def _bring_near(result: Tensor, oracle: Oracle, device: torch.device) -> tuple[Tensor, Oracle]:
    """Return both on the device that compares them faster."""
    truth = None if oracle.truth is None else near(oracle.truth, device)
    return near(result, device), replace(oracle, eager=near(oracle.eager, device), truth=truth)


def _compare_one(
    key: Key,
    iteration: int,
    pair: tuple[Tensor | None, Oracle | None],
    tolerance: Tolerance,
    device: torch.device,
) -> Iterator[Comparison]:
    result, oracle = pair
    if result is not None and oracle is not None:
        same = equal(key, iteration, result, oracle)
        yield same or compare(key, iteration, *_bring_near(result, oracle, device), tolerance)
    elif result is not None and key[0].startswith(GRADIENT) and not result.any():  # its update shows the effect
        yield Comparison(*key, iteration, 0.0, 0.0, note="zero, where eager has none")
    elif result is not None:
        yield Comparison(*key, iteration, math.inf, math.inf, None, "eager has no such tensor")
    elif not key[0].startswith(GRADIENT):  # a lost gradient is a different defect from a wrong one
        yield Comparison(*key, iteration, math.inf, math.inf, None, "missing, where eager has one")
