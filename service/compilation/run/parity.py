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
from dataclasses import dataclass

import torch
from torch import Tensor

from service.compilation.run.oracles import Oracle, elements_of, rms
from service.jobs.spec.compile import Tolerance

NOTHING_FINITE = "no finite number to compare"
EXACT = Tolerance.model_construct(absolute=0.0, ratio=1.0)
"""The tolerance of whole numbers: a step count or the number of a token is right or wrong, however large it is."""


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


def compare(key: tuple[str, str], iteration: int, result: Tensor, oracle: Oracle, tolerance: Tolerance) -> Comparison:
    """Judge ``result``, the ``(kind, name)`` of an iteration, by the rule above.

    A difference in shape, dtype or finiteness is never within tolerance, nor one of whole numbers.
    """
    tolerance = tolerance if oracle.eager.is_floating_point() else EXACT
    problem, found = _unlike(result, oracle.eager), None
    if not problem and (found := _measure(result, oracle, tolerance)) is None:
        problem = _otherwise_infinite(result, oracle.eager)
    if problem:
        return Comparison(*key, iteration, math.inf, math.inf, None, problem)
    found = found or _measure(result, oracle, tolerance, torch.isfinite(oracle.eager))
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


def _measure(result: Tensor, oracle: Oracle, tolerance: Tolerance, which: Tensor | None = None) -> _Distances | None:
    """Measure the elements ``which``; without it all, and return ``None`` unless all are finite. ``None`` for nothing.

    The device is waited for once: processes that share it make each wait long.
    """
    truth = oracle.truth if oracle.truth is not None and oracle.truth.shape == result.shape else None
    compared = (result, oracle.eager, oracle.eager if truth is None else truth)
    got, eager, exact = (each.flatten().double() if which is None else elements_of(each, which) for each in compared)
    if not got.numel():
        return None
    distance, peak, bearable = (got - eager).abs(), oracle.noise.peak, oracle.bearable
    close = _beyond_close(distance, eager, oracle, min(peak, bearable), tolerance)
    noisy = close if peak <= bearable else _beyond_close(distance, eager, oracle, peak, tolerance)
    figures = torch.stack([distance.max(), close, noisy, _rms(got - exact), _rms(eager - exact)]).tolist()
    if not math.isfinite(figures[0]):
        return None
    is_known = truth is not None and all(map(math.isfinite, figures[3:]))
    return _Distances(got.numel(), *figures[:3], *(figures[3:] if is_known else (None, 0.0)))


def compare_running_on(
    key: tuple[str, str], iteration: int, result: Tensor, oracle: Oracle, tolerance: Tolerance
) -> Comparison:
    """Judge ``result`` of an iteration that continues others, by its distance over all elements."""
    if problem := _unlike(result, oracle.eager) or _otherwise_infinite(result, oracle.eager):
        return Comparison(*key, iteration, math.inf, math.inf, None, problem)
    finite = torch.isfinite(oracle.eager)
    distance = (elements_of(result, finite) - elements_of(oracle.eager, finite)).abs()
    if not distance.numel() or not oracle.scale:
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    settings = oracle.settings
    permitted = settings.running_on * tolerance.absolute + settings.drift * oracle.drift
    return Comparison(*key, iteration, rms(distance) / oracle.scale / permitted, float(distance.max()))


def _unlike(result: Tensor, eager: Tensor) -> str:
    if result.shape != eager.shape:
        return f"shape {tuple(result.shape)} instead of {tuple(eager.shape)}"
    if result.dtype != eager.dtype:
        return f"dtype {result.dtype} instead of {eager.dtype}"
    return ""


def _otherwise_infinite(result: Tensor, eager: Tensor) -> str:
    finite = torch.isfinite(eager)
    if not torch.equal(torch.isfinite(result), finite):
        return "NaN or infinity where eager has none, or the other way round"
    odd = ~finite
    if bool(odd.any()) and not torch.equal(result[odd].nan_to_num(), eager[odd].nan_to_num()):
        return "another infinity, or NaN instead of one"
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


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 1.0 if not part else math.inf
