"""Makes the standards by which each tensor of a compiled run is judged, out of the uncompiled runs.

Large tensors are judged on the program's own device: a core of the host takes ten times as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from service.compilation.run.copies import near, read
from service.compilation.run.parity_settings import SETTINGS, ParitySettings
from service.compilation.run.sampling import Key

Tensors = Mapping[Key, Tensor]
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Noise:
    """The distance between two eager runs."""

    peak: float = 0.0
    """The largest distance of two elements."""
    rms: float = 0.0
    """The root mean square of all."""


@dataclass(frozen=True)
class Oracle:
    """The standard by which one tensor of a compiled run is judged."""

    eager: Tensor
    truth: Tensor | None
    """The result in float64; ``None`` if there is none, or it is another computation."""
    scale: float
    """The size at which it is judged (:meth:`ParitySettings.judged_scale`)."""
    noise: Noise = Noise()
    settings: ParitySettings = SETTINGS
    drift: float = 0.0
    """How far eager has moved from float64 by a free iteration, as a fraction of a tensor's size."""
    allowed: Noise = Noise()
    """How far TF32 moves it."""
    rounding: float = 0.0
    """How far eager is from float64."""
    is_rounding: bool = False
    """Whether nothing is left of a gradient but the rounding of its terms."""

    @property
    def unit(self) -> float:
        """Return the factor of the absolute tolerance: the scale, at most 1, since a part of each element is permitted
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

    def fraction(self, noise: Noise) -> float:
        """Return a distance as a fraction of the tensor's size."""
        if not noise.rms:
            return 0.0
        return noise.rms / self.scale if self.scale else math.inf


def oracles_of(
    eager: Sequence[Tensors],
    again: Sequence[Tensors],
    truth: Sequence[Tensors] | None,
    tf32: tuple[Sequence[Tensors], Sequence[Tensors]] | None,
    device: torch.device,
) -> tuple[Mapping[Key, Oracle], ...]:
    """Return how to judge each tensor of each iteration, from the results of two eager runs, one in float64, and two
    that TF32 sets apart; every rung is judged by the same.
    """
    nothing: list[Mapping[Key, Any]] = [{}] * len(eager)
    allowed = [_apart_by_tf32(*pair, device) for pair in zip(*tf32, strict=True)] if tf32 else nothing
    return tuple(oracles_of_one(*each, device) for each in zip(eager, again, truth or nothing, allowed, strict=True))


def oracles_of_one(
    eager: Tensors, again: Tensors, truth: Tensors, allowed: Mapping[Key, Noise], device: torch.device
) -> dict[Key, Oracle]:
    """Return how to judge each tensor of one iteration."""
    close = near(eager, device)
    scales = scales_of(close)
    errors = scales_of(_errors(close, near({key: truth[key] for key in eager.keys() & truth.keys()}, device)))
    noises = noises_of(eager, again, device, close)
    largest: dict[str, float] = defaultdict(float)
    for (kind, _), scale in scales.items():
        largest[kind] = max(largest[kind], scale)
    found = {}
    for key, value in eager.items():
        rounding = errors.get(key, 0.0)
        terms = terms_scale(scales[key], rounding, value.dtype)
        found[key] = Oracle(
            value,
            truth.get(key),
            SETTINGS.judged_scale(scales[key], largest[key[0]], terms),
            noises[key],
            allowed=allowed.get(key, Noise()),
            rounding=rounding,
            is_rounding=key[0] == "gradient" and is_rounding(scales[key], rounding),
        )
    return found


def _errors(eager: Tensors, truth: Tensors) -> dict[Key, Tensor]:
    """Return how far each tensor of eager is from float64, where both are numbers of one computation."""
    return {
        key: value.double() - truth[key].double()
        for key, value in eager.items()
        if key in truth and value.is_floating_point() and value.shape == truth[key].shape
    }


def _apart_by_tf32(full: Tensors, rounded: Tensors, device: torch.device) -> dict[Key, Noise]:
    return noises_of({key: full.get(key, _NOTHING) for key in full.keys() | rounded.keys()}, rounded, device)


def all_of(oracles: Iterable[Mapping[Key, Oracle]]) -> Iterator[Oracle]:
    """Yield the standards of several iterations."""
    return chain.from_iterable(each.values() for each in oracles)


def drifts(oracles: Sequence[Mapping[Key, Oracle]], iterations: int) -> tuple[float | None, ...]:
    """Return how far eager has moved from float64, as ``Baseline.drifts`` lists it."""
    reached = accumulate((_apart(each.values()) for each in oracles[iterations + 1 :]), max)
    return (*[None] * (iterations + 1), *(each if each <= SETTINGS.drift_limit else None for each in reached))


def _apart(oracles: Iterable[Oracle]) -> float:
    """Return how far eager and float64, or two eager runs, are apart in an iteration."""
    pairs = [each for each in oracles if each.eager.is_floating_point() and each.scale]
    return max((max(each.rounding, each.noise.rms, each.allowed.rms) / each.scale for each in pairs), default=0.0)


def scales_of(tensors: Mapping[Key, Tensor]) -> dict[Key, float]:
    """Return the scale of each tensor; the device is waited for once, for all whose elements are finite."""
    sizes = read({key: rms(value.double()).view(1) for key, value in tensors.items()})
    return {key: size if math.isfinite(size) else scale_of(tensors[key]) for key, (size,) in sizes.items()}


def scale_of(tensor: Tensor) -> float:
    """Return the root mean square of the finite elements; 0 for an empty tensor."""
    values = elements_of(tensor, torch.isfinite(tensor))
    largest = float(values.abs().max()) if values.numel() else 0.0
    return largest * float(rms(values / largest)) if largest else 0.0  # so divided, no square overflows


def terms_scale(own: float, rounding: float, dtype: torch.dtype) -> float:
    """Return the size of the terms whose sum a tensor of eager is, as far as they cancel; 0 if they do not.

    ``own`` is its size, ``rounding`` its distance from float64 on average. A float32 sum is off by about one
    unit in the last place of its terms, in whatever order they are added: nothing else is left of the gradient of a
    bias before a normalisation, whose true value is 0, and that of the weight beside it lacks a digit or two.
    """
    terms = rounding / torch.finfo(dtype).eps if own and rounding else 0.0
    if terms < SETTINGS.some_lost * own:
        return 0.0
    return terms if is_rounding(own, rounding) else min(terms, SETTINGS.most_lost * own)


def is_rounding(own: float, rounding: float) -> bool:
    """Return whether nothing is left of a tensor of this size but the rounding of its terms."""
    return rounding > 0 and rounding >= SETTINGS.cancelled * own


def noise_of(eager: Tensor, again: Tensor) -> Noise:
    """Return the distance of two eager runs; it is infinite if only one of them is finite."""
    key = ("", "")
    return noises_of({key: eager}, {key: again}, eager.device)[key]


def noises_of(eager: Tensors, again: Tensors, device: torch.device, close: Tensors | None = None) -> dict[Key, Noise]:
    """Return the distances of the tensors of two eager runs, measured on ``device``, where the large ones of ``eager``
    may be ``close`` already. What ``again`` lacks is infinitely far.
    """
    found, left = {}, []
    for key, value in eager.items():
        other = again.get(key, _NOTHING)
        if value.shape != other.shape:
            found[key] = Noise(math.inf, math.inf)
        elif torch.equal(value, other) or not value.numel():
            found[key] = Noise()
        else:
            left.append(key)
    ones = {key: close[key] for key in left} if close else near({key: eager[key] for key in left}, device)
    others = near({key: again[key] for key in left}, device)
    figures = read({key: _peak_and_rms(ones[key], others[key]) for key in left})
    return found | {key: Noise(*figures[key]) for key in left}


def _peak_and_rms(one: Tensor, other: Tensor) -> Tensor:
    lost = torch.isfinite(one) != torch.isfinite(other)
    distance = distances(one, other).masked_fill(lost, math.inf).nan_to_num(nan=0.0, posinf=math.inf)
    return torch.stack([distance.max(), rms(distance)])


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return how far apart elements are in float64, in which different whole numbers may be the same: 1 at least."""
    apart = (one.double() - other.double()).abs()
    return apart if one.is_floating_point() else apart.maximum((one != other).double())


def comparable(eager: Tensor, truth: Tensor) -> bool:
    """Return whether a float64 output is the same computation as eager's; different random draws are not."""
    if eager.shape != truth.shape:
        return False
    distance = scale_of(eager.double() - truth.double())
    return distance <= SETTINGS.same_computation * scale_of(truth) + 1e-12


def elements_of(tensor: Tensor, which: Tensor) -> Tensor:
    """Return those elements as float64, in one dimension."""
    return (tensor.flatten() if bool(which.all()) else tensor[which]).double()


def rms(values: Tensor) -> Tensor:
    """Return the root mean square of all elements."""
    return values.square().mean().sqrt()
