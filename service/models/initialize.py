"""Draws initial weights that depend only on the seed, the parameter's name and the element's place.

Random bits come from a counter, not from a stream: element i of a parameter has the i-th output of SplitMix64 (Steele,
Lea & Flood, 2014) with a key from (seed, name). So each rank draws only its own part, on its own device, and the global
weights are the same for every layout (between kinds of device up to the rounding of a logarithm).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import nan, pi, prod
from typing import Protocol

import torch
from torch import Tensor, nn

from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.placement import ParameterPlace, divided

AT_ONCE = 2**22
"""The elements drawn together: they bound the temporaries, which take some 50 bytes each."""


class Distribution(Protocol):
    """Turns 64 random bits per element (int64) into float32 values of the same shape, on the same device."""

    def __call__(self, bits: Tensor) -> Tensor:
        """Return the values for these bits."""


@dataclass(frozen=True)
class Normal:
    """Draws from mean 0, by the transform of Box & Muller (1958)."""

    std: float

    def __call__(self, bits: Tensor) -> Tensor:
        radius = (-2 * unit(bits >> 32).log()).sqrt()
        return radius * (2 * pi * unit(bits)).cos() * self.std


@dataclass(frozen=True)
class Uniform:
    """Draws between ``-bound`` and ``bound``."""

    bound: float

    def __call__(self, bits: Tensor) -> Tensor:
        return (2 * unit(bits >> 32) - 1) * self.bound


@dataclass(frozen=True)
class Constant:
    value: float

    def __call__(self, bits: Tensor) -> Tensor:
        return torch.full_like(bits, self.value, dtype=torch.float32)


def unit(bits: Tensor) -> Tensor:
    """Return the lower 32 bits as a float32 in (0, 1]."""
    return ((bits & 0xFFFFFFFF).float() + 0.5) * 2.0**-32


def key_of(seed: int, name: str) -> int:
    """Return the key of one parameter, a signed 64-bit number."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "big", signed=True)


def random_bits(key: int, counters: Tensor) -> Tensor:
    """Compute SplitMix64 at int64 ``counters``; products and sums wrap around."""
    state = (counters + 1) * _signed(0x9E3779B97F4A7C15) + key
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    mixed: Tensor = state ^ _shifted(state, 31)
    return mixed


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(state: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; int64 tensors would fill with the sign."""
    shifted: Tensor = (state >> places) & (2 ** (64 - places) - 1)
    return shifted


def draw(
    distribution: Distribution,
    key: int | None,
    shape: tuple[int, ...],
    dimension: int | None,
    axis: Axis,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return this rank's part of a parameter of global ``shape``, divided along ``dimension`` over ``axis``.

    Without a ``key`` it is NaN.
    """
    own = [divided(size, axis, "dimension") if index == dimension else size for index, size in enumerate(shape)]
    starts = [axis.rank * size if index == dimension else 0 for index, size in enumerate(own)]
    part = torch.empty(own, dtype=dtype, device=device)
    if key is None:
        return part.fill_(nan)
    rows = part if part.dim() else part.view(1)
    step = max(AT_ONCE // max(prod(own[1:]), 1), 1)
    for row in range(0, len(rows), step):
        chunk = rows[row : row + step]
        first = [starts[0] + row, *starts[1:]] if own else [0]
        chunk.copy_(distribution(random_bits(key, _counters(tuple(chunk.shape), first, shape or (1,), device))))
    return part


def _counters(sizes: tuple[int, ...], first: list[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row-major places, in a tensor of ``shape``, of the block of ``sizes`` at ``first``."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for index, (size, start) in enumerate(zip(sizes, first, strict=True)):
        stride = prod(shape[index + 1 :])
        along = torch.arange(start, start + size, device=device) * stride
        places = places + along.view(-1, *(1 for _ in sizes[index + 1 :]))
    return places


def materialize(
    model: nn.Module,
    places: Iterable[ParameterPlace],
    distribution: Callable[[str], Distribution],
    *,
    axis: Axis = SINGLE,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
) -> None:
    """Draw the weights of a model planned on the meta device, in its ``places``: this rank's part of each, on
    ``device``.

    A tied parameter is drawn once, under the name of its first place, also for a stage that has only the second.
    Padding is zero. Without a ``seed`` weights are NaN.
    """
    drawn: dict[str, nn.Parameter] = {}
    for place in sorted(places, key=lambda place: place.name != place.known):  # first places come first
        owner, _, leaf = place.name.rpartition(".")
        if place.known not in drawn:
            key = None if seed is None else key_of(seed, place.known)
            shape, draws = place.whole(axis), distribution(place.known)
            part = draw(draws, key, shape, place.dimension, axis, dtype=dtype, device=device)
            if place.padded is not None:
                part[place.padded.own :] = 0
            learns = model.get_parameter(place.name).requires_grad
            drawn[place.known] = nn.Parameter(part, requires_grad=learns)
        setattr(model.get_submodule(owner), leaf, drawn[place.known])
    model.to(device=device)
