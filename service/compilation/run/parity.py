"""Defines the parity rule: a compiled run is at fault only if it is further from the truth than eager is.

The rule is that of PyTorch's own benchmark suite (``torch._dynamo.utils.same``): a tensor passes if it is close to
eager's, **or** if its root-mean-square distance from the float64 result is at most ``ratio`` times eager's own distance
plus a tenth of the tolerance. Few elements make a noisy distance, so small tensors get a larger ratio. The tolerance is
taken relative to the scale of the compared values, so that wrong but tiny gradients do not hide in it. If two
eager runs differ, their distance is added to it; but if they differ by a large part of that scale, agreement
would prove nothing, and the comparison says so instead of passing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from service.jobs.spec.compile import Tolerance

NOTHING_FINITE = "no finite number to compare"


@dataclass(frozen=True)
class ParitySettings:
    """Holds the constants of the rule, besides the tolerance that a spec sets.

    ``small_tensors``: up to so many elements, the permitted ratio is so much larger. ``noise_limit``, as a part of a
    tensor's scale: with eager runs this far apart, errors of that size could not be seen. ``scale_floor``: smaller
    tensors are judged at this part of their siblings' scale. ``same_computation``, as a part of its size: a float64
    output further from eager's is another computation. ``cancelled``: where eager is at least this part of its result
    away from float64, no digit of that is right: its terms cancel. Where it is ``some_lost`` units in the last place
    away, they do in part, and the terms may be taken to be so many times as large as the result, ``most_lost`` times at
    most. ``drift``: a tensor of an iteration that goes on
    from others may be off by so many times as far as eager has drifted from float64 by then, besides ``running_on``
    times the tolerance; where eager has drifted further than ``drift_limit``, nothing is said. ``tf32``: so many times
    as much as TF32 moves eager's results, those of a compiled program may be off, since both round differently; where
    it moves any by more than ``tf32_limit`` of its scale, errors would hide in that.
    """

    small_tensors: tuple[tuple[int, float], ...] = ((10, 5.0), (500, 4.0), (1000, 1.5))
    noise_limit: float = 0.05
    scale_floor: float = 0.01
    same_computation: float = 0.05
    cancelled: float = 0.5
    some_lost: float = 8.0
    most_lost: float = 16.0
    drift: float = 16.0
    running_on: float = 10.0
    drift_limit: float = 0.003
    tf32: float = 2.0
    tf32_limit: float = 0.01

    def judged_scale(self, own: float, largest: float, terms: float = 0.0) -> float:
        """Return the scale for judging a tensor: its own, at least a part of its siblings', or that of its
        ``terms`` if they cancel, which is at most the siblings'.
        """
        return max(own, self.scale_floor * largest, min(largest, terms))

    def ratio(self, elements: int, ratio: float) -> float:
        """Return the permitted ratio for a tensor of so many elements; large ones are permitted ``ratio``."""
        return ratio * next((factor for limit, factor in self.small_tensors if elements <= limit), 1.0)


SETTINGS = ParitySettings()
EXACT = Tolerance.model_construct(absolute=0.0, ratio=1.0)
"""The tolerance of whole numbers: a step count or the number of a token is right or wrong, however large it is."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of one iteration, compared.

    ``excess`` is the distance over what is permitted: at most 1 passes. ``ratio`` is the distance from float64
    over eager's (``None`` without a float64 reference). ``noise``: how far two eager runs are apart, as a part of the
    tensor's scale; ``is_noisy``: too far to tell. ``stale_by``: the value is eager's of so many iterations before.
    """

    kind: str
    name: str
    iteration: int
    excess: float
    max_abs: float
    ratio: float | None = None
    note: str = ""
    noise: float = 0.0
    is_noisy: bool = False
    stale_by: int = 0

    @property
    def passed(self) -> bool:
        return self.excess <= 1 and not self.is_noisy


@dataclass(frozen=True)
class Noise:
    """Says how far two eager runs are apart: the largest distance of two elements, and the root mean square of all."""

    peak: float = 0.0
    rms: float = 0.0


@dataclass(frozen=True)
class Oracle:
    """Holds the standard for one compiled tensor: ``scale`` is its size, by :meth:`ParitySettings.judged_scale`;
    ``rounding``, the distance of eager from float64; ``drift``, for a free iteration, the same as a part of its size;
    ``allowed``, how far TF32 moves it; ``is_rounding``: of a gradient nothing is left but the rounding of its terms.
    """

    eager: Tensor
    truth: Tensor | None
    scale: float
    noise: Noise = Noise()
    settings: ParitySettings = SETTINGS
    drift: float = 0.0
    allowed: Noise = Noise()
    rounding: float = 0.0
    is_rounding: bool = False

    @property
    def unit(self) -> float:
        """Return the factor of the tolerance: the scale, at most 1, since a part of each element is permitted
        besides.
        """
        return min(1.0, self.scale)

    @property
    def bearable(self) -> float:
        """Return the most of the noise that is added to the tolerance."""
        return self.settings.noise_limit * self.scale

    @property
    def tf32(self) -> Noise:
        """Return the additional permitted error: none if TF32 moves so much that an error could not be seen."""
        times = self.settings.tf32 if self.allowed.rms <= self.bearable else 0.0
        return Noise(times * self.allowed.peak, times * self.allowed.rms)


def equal(key: tuple[str, str], iteration: int, result: Tensor, oracle: Oracle) -> Comparison | None:
    """Judge a ``result`` that is eager's to the last bit, as :func:`compare` would; ``None`` if it is not."""
    eager, truth, noise = oracle.eager, oracle.truth, oracle.noise.rms
    if result.shape != eager.shape or result.dtype != eager.dtype or not torch.equal(result, eager):
        return None
    finite = torch.isfinite(eager)
    if not bool(finite.any()):
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    is_known = truth is not None and truth.shape == eager.shape and bool(torch.isfinite(truth[finite]).all())
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
    problem = _mismatch(result, oracle.eager)
    if problem:
        return Comparison(*key, iteration, math.inf, math.inf, None, problem)
    finite = torch.isfinite(oracle.eager)
    got, eager = _chosen(result, finite), _chosen(oracle.eager, finite)
    if not got.numel():
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    distance, noise = (got - eager).abs(), oracle.noise
    ratio, beyond = _beyond_truth(got, eager, finite, oracle, tolerance)
    excess = min(_beyond_close(distance, eager, oracle, min(noise.peak, oracle.bearable), tolerance), beyond)
    # Too far off to pass, but no further than two eager runs are apart: undecidable.
    lost = excess > 1 and _beyond_close(distance, eager, oracle, noise.peak, tolerance) <= 1
    return Comparison(
        *key,
        iteration,
        excess,
        float(distance.max()),
        ratio,
        noise=_ratio(noise.rms, oracle.scale) if noise.rms else 0.0,
        is_noisy=noise.rms > oracle.bearable or lost,
    )


def scale_of(tensor: Tensor) -> float:
    """Return the root mean square of the finite elements; 0 for an empty tensor."""
    values = _chosen(tensor, torch.isfinite(tensor))
    return _rms(values) if values.numel() else 0.0


def terms_scale(own: float, rounding: float, dtype: torch.dtype, settings: ParitySettings = SETTINGS) -> float:
    """Return the size of the terms whose sum a tensor of eager is, as far as they cancel; 0 if they do not.

    ``own`` is its size, ``rounding`` its distance from float64 (:func:`rounding_of`). A float32 sum is off by about one
    unit in the last place of its terms, in whatever order they are added: nothing else is left of the gradient of a
    bias before a normalisation, whose true value is 0, and that of the weight beside it lacks a digit or two.
    """
    terms = rounding / torch.finfo(dtype).eps if own and rounding else 0.0
    if terms < settings.some_lost * own:
        return 0.0
    return terms if is_rounding(own, rounding, settings) else min(terms, settings.most_lost * own)


def is_rounding(own: float, rounding: float, settings: ParitySettings = SETTINGS) -> bool:
    """Return whether nothing is left of a tensor of this size but the rounding of its terms."""
    return rounding > 0 and rounding >= settings.cancelled * own


def rounding_of(eager: Tensor, truth: Tensor) -> float:
    """Return the distance of ``eager`` from float64; 0 if they are not numbers of one computation."""
    if not eager.is_floating_point() or eager.shape != truth.shape or not eager.numel():
        return 0.0
    return scale_of(eager.double() - truth.double())


def compare_running_on(
    key: tuple[str, str], iteration: int, result: Tensor, oracle: Oracle, tolerance: Tolerance
) -> Comparison:
    """Judge ``result`` of an iteration that continues others, by its distance over all elements."""
    if problem := _mismatch(result, oracle.eager):
        return Comparison(*key, iteration, math.inf, math.inf, None, problem)
    finite = torch.isfinite(oracle.eager)
    distance = (_chosen(result, finite) - _chosen(oracle.eager, finite)).abs()
    if not distance.numel() or not oracle.scale:
        return Comparison(*key, iteration, 0.0, 0.0, note=NOTHING_FINITE)
    settings = oracle.settings
    permitted = settings.running_on * tolerance.absolute + settings.drift * oracle.drift
    return Comparison(*key, iteration, _rms(distance) / oracle.scale / permitted, float(distance.max()))


def _chosen(tensor: Tensor, which: Tensor) -> Tensor:
    """Return those elements as float64, in one dimension."""
    return (tensor.flatten() if bool(which.all()) else tensor[which]).double()


def noise_of(eager: Tensor, again: Tensor) -> Noise:
    """Return the distance of two eager runs; it is infinite if only one of them is finite."""
    if eager.shape != again.shape:
        return Noise(math.inf, math.inf)
    if torch.equal(eager, again) or not eager.numel():
        return Noise()
    distance = (eager.double() - again.double()).abs()
    distance[torch.isfinite(eager) != torch.isfinite(again)] = math.inf
    distance = distance.nan_to_num(nan=0.0, posinf=math.inf)
    return Noise(float(distance.max()), _rms(distance))


def comparable(eager: Tensor, truth: Tensor, settings: ParitySettings = SETTINGS) -> bool:
    """Return whether a float64 output is the same computation as eager's; different random draws are not."""
    if eager.shape != truth.shape:
        return False
    distance = scale_of(eager.double() - truth.double())
    return distance <= settings.same_computation * scale_of(truth) + 1e-12


def _mismatch(result: Tensor, eager: Tensor) -> str:
    if result.shape != eager.shape:
        return f"shape {tuple(result.shape)} instead of {tuple(eager.shape)}"
    if result.dtype != eager.dtype:
        return f"dtype {result.dtype} instead of {eager.dtype}"
    finite = torch.isfinite(eager)
    if not torch.equal(torch.isfinite(result), finite):
        return "NaN or infinity where eager has none, or the other way round"
    odd = ~finite
    if bool(odd.any()) and not torch.equal(result[odd].nan_to_num(), eager[odd].nan_to_num()):
        return "another infinity, or NaN instead of one"
    return ""


def _beyond_close(distance: Tensor, eager: Tensor, oracle: Oracle, noise: float, tolerance: Tolerance) -> float:
    permitted = tolerance.absolute * oracle.unit + noise + oracle.tf32.peak + tolerance.absolute * eager.abs()
    return float((distance / permitted.clamp_min(torch.finfo(torch.float64).tiny)).max())


def _beyond_truth(
    got: Tensor, eager: Tensor, finite: Tensor, oracle: Oracle, tolerance: Tolerance
) -> tuple[float | None, float]:
    """Return the ratio of distances from float64, and its excess; infinite excess without a usable reference."""
    if oracle.truth is None or oracle.truth.shape != finite.shape:
        return None, math.inf
    truth = _chosen(oracle.truth, finite)
    if not bool(torch.isfinite(truth).all()):
        return None, math.inf
    ours, eagers = _rms(got - truth), _rms(eager - truth)
    rounding = max(eagers, oracle.tf32.rms)
    permitted = oracle.settings.ratio(got.numel(), tolerance.ratio) * rounding + tolerance.absolute * oracle.unit / 10
    return _ratio(ours, eagers), _ratio(ours, permitted)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 1.0 if not part else math.inf
