"""Whole, unsharded weights: gathered from any layout, put into any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from service.jobs.runtime import RefusedError
from service.parallel import distributed
from service.parallel.collectives import resolve
from service.parallel.mesh import Mesh
from service.parallel.tensor.placement import global_rows, global_tensors, local
from service.torch_internals.table import internal


class _Weight(Protocol):
    """A whole tensor, in memory or in files, that can be taken in parts: a slice for every dimension."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""

    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor:
        """Return a part of the tensor."""


Weights = Mapping[str, _Weight]
"""Weights by the names of the parameters."""


@dataclass(frozen=True)
class KeptWeights(Mapping[str, _Weight]):
    """Keeps a rank's parts of ``weights`` on ``device`` once they were taken, up to ``room`` bytes: a model that is
    built many times reads them once.
    """

    weights: Weights
    device: torch.device
    room: int
    kept: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)
    """By name and part."""

    def __getitem__(self, name: str) -> _Weight:
        return _KeptWeight(self, name, self.weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def take(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Return a part, kept or to be kept where there is room for it."""
        key = name, str(part)
        if key in self.kept:
            return self.kept[key]
        found = self.weights[name][part]
        if sum(each.nbytes for each in self.kept.values()) + found.nbytes <= self.room:
            found = self.kept[key] = found.to(self.device, copy=True)
        return found


@dataclass(frozen=True)
class _KeptWeight:
    owner: KeptWeights
    name: str
    whole: _Weight

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor:
        return self.owner.take(self.name, part)


class WeightsError(RefusedError, ValueError):
    """Weights are missing, or do not fit the model that asks for them."""


def gather(stages: nn.Module | Iterable[nn.Module], mesh: Mesh) -> dict[str, Tensor]:
    """Return the whole model's parameters and buffers on the CPU of rank 0; empty on other ranks. Every rank must call
    it.

    ``stages`` are this rank's modules: one, or several pipeline stages. Tensors move one at a time.
    """
    own = [stages] if isinstance(stages, nn.Module) else list(stages)
    parameters = {name: tensor for stage in own for name, tensor in global_tensors(stage)}
    rows = {name: count for stage in own for name, count in global_rows(stage).items()}
    shapes = {name: _shape(tensor, rows.get(name)) for name, tensor in parameters.items()}
    found: dict[str, Tensor] = {}
    for owner, entries in enumerate(_catalogue(parameters, shapes, mesh)):
        for name, shape, dtype in entries:
            whole = whole_tensor(parameters[name])[: shape[0]] if mesh.pp.rank == owner else None
            if owner > 0 and mesh.dp.rank == mesh.tp.rank == 0:
                whole = _from_stage(owner, whole, (shape, dtype), mesh)
            if mesh.rank == 0 and whole is not None:
                found[name] = whole.to("cpu", copy=True)
    return found


def load_into(module: nn.Module, state: Weights) -> None:
    """Put whole weights into a module of any layout (tensor-parallel, FSDP, one stage); no collective.

    ``state`` may hold more than the module has, as it does for a stage: of files only this rank's parts are read,
    one at a time. Raises :class:`WeightsError` before anything is changed when a name is missing or a shape differs,
    and where this rank's part is not finite.
    """
    rows, own = global_rows(module), dict(global_tensors(module))
    for name, parameter in own.items():
        if name not in state:
            raise WeightsError(f"no weights for {name!r}: they belong to another model")
        if state[name].shape != (shape := _shape(parameter, rows.get(name))):
            held, wanted = tuple(state[name].shape), tuple(shape)
            raise WeightsError(f"weights for {name!r} have shape {held}; this model has {wanted}")
    with torch.no_grad():
        for name, parameter in own.items():
            target = local(parameter)
            _fill(target, state[name], own_slices(parameter), rows.get(name))
            if target.numel() and not all(bool(each.isfinite()) for each in target.aminmax()):
                raise WeightsError(f"weights for {name!r} are not all finite: correct them, no training could go on")


def _shape(parameter: Tensor, rows: int | None) -> torch.Size:
    """Return the shape of the whole parameter, with ``rows`` before the padding."""
    return parameter.shape if rows is None else torch.Size((rows, *parameter.shape[1:]))


def _fill(target: Tensor, whole: _Weight, own: tuple[slice, ...], rows: int | None) -> None:
    """Copy a rank's own part; its rows behind ``rows`` are padding, and zero."""
    if rows is not None and own[0].stop > rows:
        target[(count := max(rows - own[0].start, 0)) :] = 0
        target, own = target[:count], (slice(own[0].start, own[0].start + count), *own[1:])
        if not count:
            return
    target.copy_(whole[own])


def whole_tensor(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return this rank's part of the whole, in every dimension; of nothing, the start may lie behind the end."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        part = internal("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
        shape, offset = part(shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


Entry = tuple[str, torch.Size, torch.dtype]


def _catalogue(parameters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], mesh: Mesh) -> list[list[Entry]]:
    """Return the names, shapes and types of every pipeline rank's parameters, in an order that all ranks share."""
    own: list[Entry] = [(name, shapes[name], tensor.dtype) for name, tensor in parameters.items()]
    return distributed.gather(own, resolve(mesh.pp.group)) if mesh.pp.group else [own]


def _from_stage(owner: int, whole: Tensor | None, kind: tuple[torch.Size, torch.dtype], mesh: Mesh) -> Tensor:
    """Return a parameter of pipeline rank ``owner`` on every rank of this pipeline."""
    shape, dtype = kind
    received = torch.empty(shape, dtype=dtype, device=mesh.device_type) if whole is None else whole.contiguous()
    dist.broadcast(received, mesh.pp_ranks[owner], group=resolve(mesh.pp.group))
    return received
