"""Tensors that are divided over ranks: joined, and a rank's part of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.parallel.mesh import Axis
from service.parallel.tensor.placement import sharded_dimensions


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_parts(whole: nn.Module, divided: nn.Module, axis: Axis) -> None:
    """Give the parameters of a rank's module its parts of the whole ones, which have no padding."""
    with torch.no_grad():
        for name, parameter, dimension in sharded_dimensions(divided):
            source: Tensor = whole.get_parameter(name)
            if dimension is not None and axis.size > 1:
                length = source.shape[dimension] // axis.size
                source = source.narrow(dimension, axis.rank * length, length)
            parameter.copy_(source)
