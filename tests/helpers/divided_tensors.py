"""Tensors that are divided over ranks, joined."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
