"""The gradient norm over all parameters of a model, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.parallel.collectives import resolve
from service.parallel.mesh import Mesh


def clip(parameters: Iterable[nn.Parameter], mesh: Mesh, limit: float | None) -> Tensor:
    """Scale the gradients so that their global L2 norm is at most ``limit``; the norm before that, a scalar.

    The norm spans tensor-parallel and FSDP shards (through DTensor) and all pipeline stages; every rank must call it.
    With ``None`` nothing is scaled.
    """
    own = list(parameters)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    if gradients:
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        norm = torch.zeros((), device=mesh.device_type)
    if mesh.pp.group:
        squared = norm.square()
        dist.all_reduce(squared, group=resolve(mesh.pp.group))
        norm = squared.sqrt()
    if limit is not None:
        nn.utils.clip_grads_with_norm_(own, limit, norm)
    return norm
