"""Makes the standards by which each tensor of a compiled run is judged, out of the uncompiled runs.

Large tensors are judged on the program's own device: a core of the host takes ten times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from service.compilation.run.parity import (
    SETTINGS,
    Noise,
    Oracle,
    is_rounding,
    noise_of,
    rounding_of,
    scale_of,
    terms_scale,
)
from service.compilation.run.sampling import Key

Tensors = Mapping[Key, Tensor]
_NOTHING = torch.empty(0)
_LARGE = 2**13
"""Elements from which on a copy to the device pays."""


def near(value: Tensor, device: torch.device) -> Tensor:
    """Return a large tensor on ``device``, and a small one where it is."""
    return value.to(device) if value.numel() >= _LARGE else value


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
    allowed = [_apart_by_tf32(*pair) for pair in zip(*tf32, strict=True)] if tf32 else nothing
    return tuple(judging(*each, device) for each in zip(eager, again, truth or nothing, allowed, strict=True))


def judging(
    eager: Tensors, again: Tensors, truth: Tensors, allowed: Mapping[Key, Noise], device: torch.device
) -> dict[Key, Oracle]:
    """Return how to judge each tensor of one iteration."""
    scales = {key: scale_of(near(value, device)) for key, value in eager.items()}
    largest = {kind: max(scale for (k, _), scale in scales.items() if k == kind) for kind, _ in scales}
    found = {}
    for key, value in eager.items():
        exact = truth.get(key)
        rounding = 0.0 if exact is None else rounding_of(near(value, device), near(exact, device))
        terms = terms_scale(scales[key], rounding, value.dtype)
        found[key] = Oracle(
            value,
            exact,
            SETTINGS.judged_scale(scales[key], largest[key[0]], terms),
            noise_of(value, again.get(key, _NOTHING)),
            allowed=allowed.get(key, Noise()),
            rounding=rounding,
            is_rounding=key[0] == "gradient" and is_rounding(scales[key], rounding),
        )
    return found


def _apart_by_tf32(full: Tensors, rounded: Tensors) -> dict[Key, Noise]:
    keys = full.keys() | rounded.keys()
    return {key: noise_of(full.get(key, _NOTHING), rounded.get(key, _NOTHING)) for key in keys}


def all_of(oracles: Iterable[Mapping[Key, Oracle]]) -> Iterator[Oracle]:
    """Yield the standards of several iterations."""
    return chain.from_iterable(each.values() for each in oracles)


def part(noise: Noise, oracle: Oracle) -> float:
    """Return the noise as a part of the tensor's size."""
    if not noise.rms:
        return 0.0
    return noise.rms / oracle.scale if oracle.scale else math.inf


def drifts(oracles: Sequence[Mapping[Key, Oracle]], iterations: int) -> tuple[float | None, ...]:
    """Return how far eager has moved from float64, as ``Reference.drifts`` has it."""
    reached = accumulate((_apart(each.values()) for each in oracles[iterations + 1 :]), max)
    return (*[None] * (iterations + 1), *(each if each <= SETTINGS.drift_limit else None for each in reached))


def _apart(oracles: Iterable[Oracle]) -> float:
    """Return how far eager and float64, or two eager runs, are apart in an iteration."""
    pairs = [each for each in oracles if each.eager.is_floating_point() and each.scale]
    return max((max(each.rounding, each.noise.rms, each.allowed.rms) / each.scale for each in pairs), default=0.0)
