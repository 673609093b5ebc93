"""Computes the gradient norm over the whole mesh: the same number in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def squared_norm(gradients: Sequence[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Return this rank's contribution to the squared L2 norm, a float64 scalar.

    ``ranks`` is how many ranks hold the stage that the gradients belong to. An element that several of them hold
    counts for its share in each, so that the sum of the contributions over all ranks is the norm of the whole model.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients]))
    shares = torch.tensor([_shards(gradient) / ranks for gradient in gradients], dtype=torch.float64)
    return norms.double().square() @ shares.to(device, non_blocking=True)


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale the gradients in place so that ``norm``, their global one, is at most ``limit``; waits for no device."""
    if gradients:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype)
        torch._foreach_mul_([local(gradient) for gradient in gradients], scale)


def local(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def present(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _shards(tensor: Tensor) -> int:
    """Return into how many parts the ranks cut ``tensor``."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
