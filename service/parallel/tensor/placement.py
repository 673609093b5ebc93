"""Defines the placement of a model's parameters: the divided dimension, global shapes, local and global forms.

A layer declares ``sharded: dict[parameter name, dimension]``; what it does not name is replicated. Where the first
dimension of a parameter has padding at its end, it declares ``padded_rows: dict[parameter name, PaddedAxis]``.

With tp > 1 *every* parameter becomes a DTensor over the ``tp`` mesh, the replicated ones too, so that FSDP2,
optimisers, gradient clipping and checkpoints see one kind of tensor.

A parameter that a model uses in two places, such as one table for embedding and head (Press & Wolf, 2017), is *tied*.
A family's module says so by ``tied``: for each second place the name of the first. A model in one piece has one
parameter for both. Of a pipeline the first stage has one and the last a copy, which starts from the same numbers and
stays equal, since both get the sum of both gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import getattr_static

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from service.parallel.mesh import Axis, PaddedAxis
from service.torch_internals.table import internal_of


def divided(size: int, axis: Axis, what: str) -> int:
    """Return a rank's share of ``size``; raises ``ValueError`` when it does not divide."""
    if size % axis.size:
        raise ValueError(f"{what}={size} does not divide by tp={axis.size}")
    return size // axis.size


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiable: what a layer computes with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True)
class ParameterPlace:
    """Where a module of a model has a parameter, as its layers declare it.

    ``name`` is that of the place, and ``known`` the parameter's name in every layout: that of its first place.
    ``shape`` is that of this rank's part, of which ``dimension`` is divided over ``tp``; ``None``: it is replicated.
    The first dimension of a parameter with padding is divided as ``padded`` says.
    """

    name: str
    known: str
    shape: tuple[int, ...]
    dimension: int | None = None
    padded: PaddedAxis | None = None

    def whole(self, axis: Axis) -> tuple[int, ...]:
        """Return the shape of the whole parameter, with its padding, of which this rank of ``axis`` has a part."""
        return tuple(
            length * axis.size if index == self.dimension else length for index, length in enumerate(self.shape)
        )

    def unpadded(self, axis: Axis) -> tuple[int, ...]:
        """Return the shape of the whole parameter without padding."""
        whole = self.whole(axis)
        return whole if self.padded is None else (self.padded.length, *whole[1:])


def places_of(model: nn.Module) -> tuple[ParameterPlace, ...]:
    """Return the places of all parameters of a model, or of a part of it, in the order of its modules."""
    tied, known, places = tied_names(model), dict[int, str](), list[ParameterPlace]()
    for prefix, module in model.named_modules():
        sharded: Mapping[str, int] = getattr(module, "sharded", {})
        padded: Mapping[str, PaddedAxis] = getattr(module, "padded_rows", {})
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            first = known.setdefault(id(parameter), tied.get(name, name))
            places.append(ParameterPlace(name, first, tuple(parameter.shape), sharded.get(leaf), padded.get(leaf)))
    return tuple(places)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_WITHOUT_PARAMETERS = frozenset(vars(nn.Module())) - {"_buffers"}
"""The attributes of every module, which need not be searched for parameters in places beside the module's."""


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
                if name not in _WITHOUT_PARAMETERS:
                    place = f"{prefix}.{name}" if prefix else name
                    yield from ((id(each), place) for each in _parameters_in(value))


def _parameters_in(value: object) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(each)


def distribute(model: nn.Module, places: Iterable[ParameterPlace], tp_mesh: DeviceMesh | None) -> None:
    """Turn the local parameters of a model, in its :func:`places_of`, into DTensors over ``tp_mesh``; without one they
    stay plain.
    """
    if tp_mesh is None:
        return
    check_replaceable(model, "the parameters of parallel.tp")
    made: dict[str, nn.Parameter] = {}  # one for each parameter, however many layers share it
    for place in places:
        owner, _, leaf = place.name.rpartition(".")
        if place.known not in made:
            parameter = model.get_parameter(place.name)
            placement = Replicate() if place.dimension is None else Shard(place.dimension)
            whole = DTensor.from_local(parameter.detach(), tp_mesh, [placement], run_check=False)
            made[place.known] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(owner), leaf, made[place.known])


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
    return {place.known: place.padded.length for place in places_of(module) if place.padded is not None}
