"""Tensors that are divided over ranks: joined, and a rank's part of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.parallel.mesh import Axis
from service.parallel.tensor.placement import places_of


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_parts(whole: nn.Module, divided: nn.Module, axis: Axis) -> None:
    """Give the parameters of a rank's module its parts of the whole ones, which have no padding."""
    with torch.no_grad():
        for place in places_of(divided):
            source: Tensor = whole.get_parameter(place.name)
            if place.dimension is not None and axis.size > 1:
                length = source.shape[place.dimension] // axis.size
                source = source.narrow(place.dimension, axis.rank * length, length)
            divided.get_parameter(place.name).copy_(source)
