"""Finds wrong results that a rung's own way of running explains, such as a gradient from the other side of a kink.

A relu, a maximum or a sorting has a gradient that jumps where two numbers are equal. The order of a sum decides on
which side of the border a number lies that is within rounding of it: both are right, outputs are the same, and in a
deep network some number is that near in one iteration of a few. So eager runs again from numbers that are off by a few
units in the last place: gradients that jump there, somewhere, may be off once by as much, and iterations that go on
from each other may part as far as eager's do.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from service.compilation.program import Program
from service.compilation.run.baseline import Baseline
from service.compilation.run.oracles import noise_of
from service.compilation.run.parity import Comparison
from service.compilation.run.parity_settings import SETTINGS
from service.compilation.run.recorded_run import RecordedRun, record_uncompiled
from service.compilation.run.sampling import Key, is_left_behind
from service.compilation.rungs import RUNGS, Rung
from service.jobs.spec.compile import Phase

_UNITS = (2, 4, 8, 16)
"""Units in the last place by which parameters and buffers are moved, in a run each."""
_TIMES = 2.0
"""How many times as far as eager's a gradient may jump: several numbers may lie near a border."""
_GRADIENT = "gradient"


def doubtful(comparisons: Sequence[Comparison], iterations: int) -> tuple[Comparison, ...]:
    """Return the comparisons that kinks may explain: gradients that are off in fewer than half of the ``iterations``,
    and all that follows from them; none if anything else is off, or has the value of an earlier iteration.
    """
    wrong = [each for each in comparisons if not each.passed]
    judged = [each for each in wrong if each.iteration < iterations and not is_left_behind(each.kind)]
    times = Counter((each.kind, each.name) for each in judged)
    if any(each.stale_by for each in wrong) or any(not each.kind.startswith(_GRADIENT) for each in judged):
        return ()
    return tuple(wrong) if all(2 * number < iterations for number in times.values()) else ()


def jumps(program: Program, phase: Phase, baseline: Baseline) -> Mapping[Key, float]:
    """Return how far each tensor of the uncompiled program is off at most, relative to its size, when its
    numbers are moved by a few units.
    """
    found: dict[Key, float] = defaultdict(float)
    eager = baseline.eager
    for units in _UNITS:
        starts = [each.nudged(units) for each in eager.starts]
        moved = record_uncompiled(program, phase, baseline.iterations, starts)
        for iteration, tensors in enumerate(moved.tensors):
            for key, value in tensors.items():
                jump = _off(key, iteration, value, baseline)
                if math.isfinite(jump):  # one from zeros, or to what is not finite, is no part of a size
                    found[key] = max(found[key], jump)
    return found


def are_kinks(found: Sequence[Comparison], own: RecordedRun, baseline: Baseline, most: Mapping[Key, float]) -> bool:
    """Return whether no tensor ``found`` in the compiled run is further off than eager itself jumps there."""
    return all(_permitted_distance(each, baseline, most) >= _off_by(each, own, baseline) for each in found)


def _permitted_distance(comparison: Comparison, baseline: Baseline, most: Mapping[Key, float]) -> float:
    jump = most.get((comparison.kind, comparison.name), 0.0)
    if comparison.iteration < baseline.iterations:
        return min(_TIMES * jump, SETTINGS.noise_limit)
    return SETTINGS.drift * jump


def _off_by(comparison: Comparison, own: RecordedRun, baseline: Baseline) -> float:
    key = (comparison.kind, comparison.name)
    value = own.tensors[comparison.iteration].get(key)
    return math.inf if value is None else _off(key, comparison.iteration, value, baseline)


def _off(key: Key, iteration: int, value: Tensor, baseline: Baseline) -> float:
    """Return how far a tensor is from eager's, as a fraction of its size; infinitely far where eager has none."""
    oracle = baseline.oracles[iteration].get(key)
    return math.inf if oracle is None else oracle.fraction(noise_of(oracle.eager, value))


_REDRAWN = (
    "Dynamo's backend eager computes a checkpointed block again with other random numbers than its forward drew, "
    "which no backend above it does"
)


def drew_otherwise(own: RecordedRun, baseline: Baseline) -> bool:
    """Return whether any iteration left the generators of random numbers in a different state from eager's."""
    pairs = zip(own.records, baseline.eager.records, strict=False)
    return any(mine.generators != theirs.generators for mine, theirs in pairs)


def own_limit(rung: Rung, baseline: Baseline, comparisons: Sequence[Comparison]) -> str:
    """Return the limit of this rung alone that explains every failed comparison; empty if there is none.

    The higher rungs, which are still tried, run the graph that Dynamo traced here, so they would show a fault in it.
    """
    wrong = [each for each in comparisons if not each.passed]
    redraws = rung.backend == RUNGS["eager"].backend and baseline.eager.random and baseline.recomputes
    judged = [each.kind for each in wrong if each.iteration < baseline.iterations]
    forward = any(not (kind.startswith(_GRADIENT) or is_left_behind(kind)) for kind in judged)
    return _REDRAWN if wrong and redraws and not forward else ""
