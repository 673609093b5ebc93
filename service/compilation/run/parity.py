"""Judges a compiled result: it is wrong only if it is further from the truth than eager's.

The rule is that of PyTorch's own benchmark suite (``torch._dynamo.utils.same``). A tensor passes if it is close to
eager's, **or** if its root-mean-square distance from the float64 result is at most ``ratio`` times eager's own distance
from it, plus a tenth of the tolerance.

The tolerance is relative to the scale of the compared tensors: in an absolute one, gradients that are tiny and wrong
would hide. Where two eager runs differ, their distance is added to the tolerance. Where they differ by a large part of
the scale, agreement would prove nothing, and the comparison says so instead of passing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from service.compilation.run.copies import read
from service.compilation.run.oracles import Oracle, distances, elements_of, rms
from service.compilation.run.sampling import Key
from service.jobs.spec.compile import Tolerance

NOTHING_FINITE = "no finite number to compare"
_LOST = "NaN or infinity where eager has none, or the other way round"
_OTHER = "another infinity, or NaN instead of one"
_EMPTY = [0.0] * 5
"""The figures of a tensor without elements."""
EXACT = Tolerance.model_construct(absolute=0.0, ratio=1.0)
"""The tolerance of whole numbers: a step count or the number of a token is right or wrong, however large it is."""
Pairs = Mapping[Key, tuple[Tensor, Oracle]]
"""Results of an iteration, each with how to judge it."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of one iteration, compared with eager's."""

    kind: str
    name: str
    iteration: int
    excess: float
    """Its distance, as a multiple of what is permitted: at most 1 passes."""
    max_abs: float
    """The largest distance of an element from eager's."""
    ratio: float | None = None
    """Its distance from float64, as a multiple of eager's; ``None`` without a float64 result."""
    note: str = ""
    """Why there was nothing to compare, or why a difference is no error."""
    noise: float = 0.0
    """The distance between two eager runs, as a fraction of the tensor's scale."""
    is_noisy: bool = False
    """Whether that is too far to tell right from wrong."""
    is_unlike: bool = False
    """Whether it has another shape or type."""
    stale_by: int = 0
    """How many iterations old the value is, where it is eager's of an earlier one."""

    @property
    def passed(self) -> bool:
        return self.excess <= 1 and not self.is_noisy


def equal(key: tuple[str, str], iteration: int, result: Tensor, oracle: Oracle) -> Comparison | None:
    """Judge a ``result`` that is eager's to the last bit, as :func:`compare` would; ``None`` if it is not."""
    eager, truth, noise = oracle.eager, oracle.truth, oracle.noise.rms
    if result.shape != eager.shape or result.dtype != eager.dtype or not torch.equal(result, eager):
        return None
    finite = torch.isfinite(eager)
    if not bool(finite.any()):
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    is_known = truth is not None and truth.shape == eager.shape and bool((torch.isfinite(truth) | ~finite).all())
    return Comparison(
        *key,
        iteration,
        excess=0.0,
        max_abs=0.0,
        ratio=1.0 if is_known else None,
        noise=_ratio(noise, oracle.scale) if noise else 0.0,
        is_noisy=noise > oracle.bearable,
    )


def compare(key: Key, iteration: int, result: Tensor, oracle: Oracle, tolerance: Tolerance) -> Comparison:
    """Judge ``result``, the ``(kind, name)`` of an iteration, by the rule above.

    A difference in shape, dtype or finiteness is never within tolerance, nor one of whole numbers.
    """
    return compare_all({key: (result, oracle)}, iteration, tolerance)[key]


def compare_all(pairs: Pairs, iteration: int, tolerance: Tolerance) -> dict[Key, Comparison]:
    """Judge each result as :func:`compare` does; the device is waited for once, for all that are finite."""
    figures = read(
        {
            key: _figures(result, oracle, _own(tolerance, oracle))
            for key, (result, oracle) in pairs.items()
            if not _unlike(result, oracle.eager) and result.numel()
        }
    )
    return {
        key: _judge(key, iteration, pair, _own(tolerance, pair[1]), figures.get(key)) for key, pair in pairs.items()
    }


def _own(tolerance: Tolerance, oracle: Oracle) -> Tolerance:
    return tolerance if oracle.eager.is_floating_point() else EXACT


def _judge(
    key: Key, iteration: int, pair: tuple[Tensor, Oracle], tolerance: Tolerance, figures: list[float] | None
) -> Comparison:
    """Judge a result by its :func:`_figures`, which an empty one, or one of another shape or type, has not."""
    result, oracle = pair
    are_finite = figures is not None and math.isfinite(figures[0])
    found = _distances(figures, result.numel(), oracle) if figures is not None and are_finite else None
    if problem := _unlike(result, oracle.eager):
        return Comparison(*key, iteration, math.inf, math.inf, None, problem, is_unlike=True)
    if problem := "" if found else _otherwise_infinite(result, oracle.eager):
        return Comparison(*key, iteration, math.inf, math.inf, None, problem)
    found = found or _finite_distances(result, oracle, tolerance)
    if found is None:
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    noise = oracle.noise.rms
    excess = min(found.beyond_close, _beyond_truth(found, oracle, tolerance))
    # Too far off to pass, but no further than two eager runs are apart: undecidable.
    lost = excess > 1 and found.beyond_noise <= 1
    return Comparison(
        *key,
        iteration,
        excess,
        found.largest,
        None if found.ours is None else _ratio(found.ours, found.eagers),
        noise=_ratio(noise, oracle.scale) if noise else 0.0,
        is_noisy=noise > oracle.bearable or lost,
    )


@dataclass(frozen=True)
class _Distances:
    """How far so many finite numbers are from eager's and from float64."""

    numbers: int
    largest: float
    beyond_close: float
    """The largest distance as a multiple of what is permitted, with the noise as far as that is bearable."""
    beyond_noise: float
    """The same, with all of the noise."""
    ours: float | None
    """The distance from float64; ``None`` without a usable result of that."""
    eagers: float
    """Eager's own."""


def _figures(result: Tensor, oracle: Oracle, tolerance: Tolerance, which: Tensor | None = None) -> Tensor:
    """Measure all elements, or those ``which``, of which there is one at least: what :func:`_distances` reads."""
    truth = oracle.eager if (exact := _truth(result, oracle)) is None else exact
    compared = (result, oracle.eager, truth)
    got, eager, true = (each.flatten().double() if which is None else elements_of(each, which) for each in compared)
    # Whole numbers are all finite.
    distance = (got - eager).abs() if result.is_floating_point() else distances(result, oracle.eager).flatten()
    peak, bearable = oracle.noise.peak, oracle.bearable
    close = _beyond_close(distance, eager, oracle, min(peak, bearable), tolerance)
    noisy = close if peak <= bearable else _beyond_close(distance, eager, oracle, peak, tolerance)
    return torch.stack([distance.max(), close, noisy, rms(got - true), rms(eager - true)])


def _truth(result: Tensor, oracle: Oracle) -> Tensor | None:
    return oracle.truth if oracle.truth is not None and oracle.truth.shape == result.shape else None


def _distances(figures: list[float], numbers: int, oracle: Oracle) -> _Distances:
    """Return what the figures of so many finite elements say; a distance that overflows is infinite."""
    is_known = oracle.truth is not None and oracle.truth.shape == oracle.eager.shape
    is_known = is_known and all(map(math.isfinite, figures[3:]))
    return _Distances(numbers, *figures[:3], *(figures[3:] if is_known else (None, 0.0)))


def _finite_distances(result: Tensor, oracle: Oracle, tolerance: Tolerance) -> _Distances | None:
    """Measure the finite elements; ``None`` without any."""
    finite = torch.isfinite(oracle.eager)
    numbers = int(finite.sum())
    return _distances(_figures(result, oracle, tolerance, finite).tolist(), numbers, oracle) if numbers else None


def compare_running_on(pairs: Pairs, iteration: int, tolerance: Tolerance) -> dict[Key, Comparison]:
    """Judge results of an iteration that continues others, each by its distance over all elements."""
    figures = read(
        {
            key: _figures_running_on(result, oracle.eager)
            for key, (result, oracle) in pairs.items()
            if not _unlike(result, oracle.eager) and result.numel()
        }
    )
    return {
        key: _judge_running_on(key, iteration, pair, tolerance, figures.get(key, _EMPTY)) for key, pair in pairs.items()
    }


def _figures_running_on(result: Tensor, eager: Tensor) -> Tensor:
    """Measure what :func:`_judge_running_on` reads."""
    finite = torch.isfinite(eager)
    lost = torch.isfinite(result) != finite
    others = (result.nan_to_num() != eager.nan_to_num()) & ~finite
    distance = (result.double() - eager.double()).abs().masked_fill(~finite | lost, 0.0)
    numbers = finite.sum().double()
    return torch.stack([lost.any().double(), others.any().double(), numbers, distance.square().sum(), distance.max()])


def _judge_running_on(
    key: Key, iteration: int, pair: tuple[Tensor, Oracle], tolerance: Tolerance, figures: list[float]
) -> Comparison:
    (result, oracle), (lost, others, numbers, squares, largest) = pair, figures
    if problem := _unlike(result, oracle.eager):
        return Comparison(*key, iteration, math.inf, math.inf, None, problem, is_unlike=True)
    if problem := _LOST if lost else _OTHER if others else "":
        return Comparison(*key, iteration, math.inf, math.inf, None, problem)
    if not numbers:
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    # Of exact zeros nothing tells the size: their drift is that of numbers around 1.
    drifted = max(oracle.drift * (oracle.scale or 1.0), oracle.rounding, oracle.noise.rms, oracle.allowed.rms)
    settings = oracle.settings
    permitted = settings.running_on * tolerance.absolute * oracle.scale + settings.drift * drifted
    distance = math.sqrt(squares / numbers)
    return Comparison(*key, iteration, _ratio(distance, permitted) if distance else 0.0, largest)


def _unlike(result: Tensor, eager: Tensor) -> str:
    if result.shape != eager.shape:
        return f"shape {tuple(result.shape)} instead of {tuple(eager.shape)}"
    if result.dtype != eager.dtype:
        return f"dtype {result.dtype} instead of {eager.dtype}"
    return ""


def _otherwise_infinite(result: Tensor, eager: Tensor) -> str:
    finite = torch.isfinite(eager)
    if not torch.equal(torch.isfinite(result), finite):
        return _LOST
    odd = ~finite
    if bool(odd.any()) and not torch.equal(result[odd].nan_to_num(), eager[odd].nan_to_num()):
        return _OTHER
    return ""


def _beyond_close(distance: Tensor, eager: Tensor, oracle: Oracle, noise: float, tolerance: Tolerance) -> Tensor:
    permitted = tolerance.absolute * oracle.unit + noise + oracle.tf32.peak + tolerance.absolute * eager.abs()
    return (distance / permitted.clamp_min(torch.finfo(torch.float64).tiny)).max()


def _beyond_truth(found: _Distances, oracle: Oracle, tolerance: Tolerance) -> float:
    """Return the distance from float64 as a multiple of what is permitted; infinity without a usable baseline."""
    if found.ours is None:
        return math.inf
    rounding = max(found.eagers, oracle.tf32.rms)
    permitted = oracle.settings.ratio(found.numbers, tolerance.ratio) * rounding + tolerance.absolute * oracle.unit / 10
    return _ratio(found.ours, permitted)


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 1.0 if not part else math.inf
