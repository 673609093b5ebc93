"""Defines the placement of a model's parameters: the divided dimension, global shapes, local and global forms.

A layer declares ``sharded: dict[parameter name, dimension]``; what it does not name is replicated. Where the first
dimension of a parameter has padding at its end, it declares ``unpadded: dict[parameter name, rows before that]``.

With tp > 1 *every* parameter becomes a DTensor over the ``tp`` mesh, the replicated ones too, so that FSDP2,
optimisers, gradient clipping and checkpoints see one kind of tensor.

A parameter that a model uses in two places, such as one table for embedding and head (Press & Wolf, 2017), is *tied*.
A family's module says so by ``tied``: for each second place the name of the first. A model in one piece has one
parameter for both. Of a pipeline the first stage has one and the last a copy, which starts from the same numbers and
stays equal, since both get the sum of both gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import getattr_static

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from service.parallel.mesh import Axis
from service.torch_internals.table import internal_of


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


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_replaceable(model: nn.Module, others: str) -> None:
    """Raise ``ValueError`` for what ``others``, which take the place of a model's parameters, would leave behind: hooks
    of a gradient, and places beside the module's in which a parameter is.
    """
    listed = dict(_listed(model))
    for name, parameter in model.named_parameters():
        if any(internal_of(parameter, f"torch.Tensor.{hooks}") for hooks in _HOOKS):
            raise ValueError(
                f"the parameter {name!r} has a hook on its gradient, which {others} do not keep; change the gradient "
                "in forward, by a torch.autograd.Function"
            )
        if id(parameter) in listed:
            raise ValueError(
                f"the parameter {name!r} is also in {listed[id(parameter)]!r}, which {others} do not keep; read it "
                "from its module"
            )


def _listed(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the ids of the parameters that lie in attributes of modules, alone or in collections, with the attribute's
    name. A module that notices when its parameters are replaced, as torch's recurrent ones, keeps its lists in step.
    """
    for prefix, module in model.named_modules():
        if getattr_static(type(module), "__setattr__") is vars(nn.Module)["__setattr__"]:
            for name, value in vars(module).items():
                if name != "_parameters":
                    place = f"{prefix}.{name}" if prefix else name
                    yield from ((id(each), place) for each in _parameters_in(value))


def _parameters_in(value: object) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(each)


def distribute(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Turn the local parameters into DTensors over ``tp_mesh``; without one they stay plain."""
    if tp_mesh is None:
        return
    check_replaceable(model, "the parameters of parallel.tp")
    made: dict[int, nn.Parameter] = {}  # one for each parameter, however many layers share it
    for name, parameter, dimension in list(sharded_dimensions(model)):
        if id(parameter) not in made:
            placement = Replicate() if dimension is None else Shard(dimension)
            whole = DTensor.from_local(parameter.detach(), tp_mesh, [placement], run_check=False)
            made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[id(parameter)])


def is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing, which wants plain operators; ``torch.compile`` wants the fastest
    ones.

    Dynamo of torch 2.11 takes ``torch.compiler.is_exporting`` for true when it compiles, too. Export does not go
    through Dynamo (``strict=False``, its default), so the second question tells the two apart.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def tied_names(module: nn.Module) -> Mapping[str, str]:
    """Return, for each second place of a tied parameter, the name of the first, which names the parameter."""
    names: Mapping[str, str] = getattr(module, "tied", {})
    return names


def global_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, under its name in every layout: that of its first place."""
    names = tied_names(module)
    for name, parameter in module.named_parameters():
        yield names.get(name, name), parameter


def state_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a state dict holds, each once: running statistics and their like. They are whole on every
    rank, and equal on all.
    """
    persistent = {
        id(value)
        for part in module.modules()
        for name, value in part.named_buffers(recurse=False)
        if name not in internal_of(part, "torch.nn.Module._non_persistent_buffers_set")
    }
    yield from ((name, value) for name, value in module.named_buffers() if id(value) in persistent)


def global_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model's checkpoint holds: its parameters and its buffers, each once, under its global name."""
    yield from global_parameters(module)
    yield from state_buffers(module)


def global_rows(module: nn.Module) -> dict[str, int]:
    """Return, by the same names, the rows without padding of each padded parameter."""
    names = tied_names(module)
    return {names.get(name, name): rows for name, rows in unpadded_rows(module).items()}


def tie(module: nn.Module) -> None:
    """Let both places share one parameter, if the module has both."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for second, first in tied_names(module).items():
        if first in parameters and second in parameters:
            owner, _, leaf = second.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameters[first])
