"""Says where the parameters of a model lie: which dimension is divided, global shapes, local and global forms.

A layer declares ``sharded: dict[parameter name, dimension]``; what it does not name is replicated. Where the first
dimension of a parameter has padding at its end, it declares ``unpadded: dict[parameter name, rows before that]``.

With tp > 1 *every* parameter becomes a DTensor over the ``tp`` mesh, the replicated ones too, so that FSDP2,
optimisers, gradient clipping and checkpoints see one kind of tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from service.parallel.mesh import Axis


def divided(size: int, axis: Axis, what: str) -> int:
    """Return a rank's share of ``size``; raises ``ValueError`` when it does not divide."""
    if size % axis.size:
        raise ValueError(f"{what}={size} does not divide by tp={axis.size}")
    return size // axis.size


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiable: what a layer computes with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sharded_dimensions(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """Yield every parameter with its qualified name and the dimension divided over ``tp`` (``None``: replicated)."""
    for prefix, module in model.named_modules():
        declared: dict[str, int] = getattr(module, "sharded", {})
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, declared.get(name)


def unpadded_rows(model: nn.Module) -> dict[str, int]:
    """Return by qualified name the rows of each parameter that has padding behind them."""
    return {
        f"{prefix}.{name}" if prefix else name: rows
        for prefix, module in model.named_modules()
        for name, rows in getattr(module, "unpadded", {}).items()
    }


def global_shape(shape: torch.Size, dimension: int | None, axis: Axis) -> tuple[int, ...]:
    """Return the shape of the whole parameter of which ``shape`` is a rank's part."""
    return tuple(length * axis.size if index == dimension else length for index, length in enumerate(shape))


def own_part(whole: Tensor, dimension: int | None, axis: Axis) -> Tensor:
    """Return this rank's part of a whole parameter (a view), which has no padding."""
    if dimension is None or axis.size == 1:
        return whole
    length = divided(whole.shape[dimension], axis, f"dimension {dimension}")
    return whole.narrow(dimension, axis.rank * length, length)


def distribute(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Turn the local parameters into DTensors over ``tp_mesh``; without one they stay plain."""
    if tp_mesh is None:
        return
    for name, parameter, dimension in list(sharded_dimensions(model)):
        placement = Replicate() if dimension is None else Shard(dimension)
        whole = DTensor.from_local(parameter.detach(), tp_mesh, [placement], run_check=False)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def local_copy(model: nn.Module) -> nn.Module:
    """Return the same model over the same storage, with this rank's parts as plain parameters: for tracing and
    analysis.

    Only for models whose parameters are whole on their ``tp`` rank (no FSDP).
    """
    replaced: dict[int, Tensor] = {
        id(parameter): nn.Parameter(local(parameter).detach(), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    replaced |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo=replaced)


def is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing, which wants plain operators; ``torch.compile`` wants the fastest
    ones.

    Dynamo of torch 2.11 takes ``torch.compiler.is_exporting`` for true when it compiles, too. Export does not go
    through Dynamo (``strict=False``, its default), so the second question tells the two apart.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
