"""Copies this rank's part of a model, without what defines DTensors unless something has brought it."""

from __future__ import annotations

import copy
import sys

from torch import Tensor, nn


def local_copy(model: nn.Module) -> nn.Module:
    """Return the same model over the same storage, with this rank's parts as plain parameters: for tracing and
    analysis.

    Only for models whose parameters are whole on their ``tp`` rank (no FSDP).
    """
    replaced: dict[int, Tensor] = {
        id(parameter): nn.Parameter(_local(parameter).detach(), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    replaced |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo=replaced)


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part. The import of DTensors takes half as long as torch's, and before it none exists."""
    divided = sys.modules.get("torch.distributed.tensor")
    if divided is None or not isinstance(parameter, divided.DTensor):
        return parameter
    part: Tensor = parameter.to_local()
    return part
