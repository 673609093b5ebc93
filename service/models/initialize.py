"""Initial weights that depend on the seed and the parameter's name alone.

Every parameter has a generator of its own, seeded by (seed, name), and is drawn whole; a rank keeps its part. So the
global weights are the same for every layout, at the price of drawing what other ranks keep: one parameter at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.placement import global_shape, own_part, sharded_dimensions


class Distribution(Protocol):
    """Draws a whole float32 parameter on the CPU."""

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Normal:
    std: float

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * self.std


@dataclass(frozen=True)
class Uniform:
    """Between ``-bound`` and ``bound``."""

    bound: float

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (2 * uniform - 1) * self.bound


@dataclass(frozen=True)
class Constant:
    value: float

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.full(shape, self.value, dtype=torch.float32, device="cpu")


def generator_for(seed: int, name: str) -> torch.Generator:
    """The generator of one parameter."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)


def materialize(
    model: nn.Module,
    distribution: Callable[[str], Distribution],
    *,
    axis: Axis = SINGLE,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    """Give a model planned on the meta device its weights: this rank's part of each, on ``device``."""
    for name, planned, dimension in list(sharded_dimensions(model)):
        shape = global_shape(planned.shape, dimension, axis)
        whole = distribution(name)(shape, generator_for(seed, name))
        part = own_part(whole, dimension, axis).to(device=device, dtype=dtype, copy=True).contiguous()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(part, requires_grad=planned.requires_grad))
    model.to(device=device)
