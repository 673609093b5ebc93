"""Builds this rank's part of a model from its family's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from service.jobs.plugins import ModelConfig
from service.jobs.spec.families import FAMILIES
from service.models.initialize import Distribution, materialize
from service.models.modes import begin_training
from service.models.outline import ModelOutline, read_outline
from service.models.plain import PlainModel, build_plain, check_planned
from service.parallel.batch_norm import normalise_over
from service.parallel.mesh import SINGLE, Axis, Mesh
from service.parallel.pipeline.stage import Part, cut
from service.parallel.tensor.placement import ParameterPlace, distribute, places_of

FamilyConfig = ModelConfig


class Model(Protocol):
    """Defines the interface of a family's module beside ``nn.Module``.

    ``output_axis`` is the axis over which the last dimension of the output is divided (size 1: not divided), a
    :class:`~service.parallel.mesh.PaddedAxis` if its length need not be a multiple of the ranks. A family whose
    model uses a parameter in two places also has ``tied``, see :mod:`service.parallel.tensor.placement`.
    """

    config: FamilyConfig
    blocks: nn.ModuleDict
    before_blocks: tuple[str, ...]
    after_blocks: tuple[str, ...]
    output_axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of a batch."""

    def distribution(self, name: str) -> Distribution:
        """Return the distribution from which the parameter of this name is drawn."""


Builder = Callable[[Any, Axis], nn.Module]
"""Builds a :class:`Model` of a family's configuration, planned on the meta device, divided over the ``tp`` axis; or any
other module, which is then one block, whole on each rank, as its constructor makes it.
"""


def build(
    config: FamilyConfig,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    part: Part | None = None,
) -> nn.Module:
    """Return this rank's part of the model: its pipeline stage (or ``part``), tensor-parallel shards, not yet FSDP's.

    The global weights are the same for every layout from one ``seed``. On the meta device nothing is drawn, nor without
    a seed: the weights, to be loaded, are NaN then, but those of a plain module, which its constructor makes. The model
    is in training mode, but for parts that are always in evaluation.
    Parameters are DTensors where the mesh has launched ``tp`` ranks, else plain tensors.
    """
    axis = SINGLE if mesh is None else mesh.tp
    if part is None:
        part = Part() if mesh is None else Part(mesh.pp.rank, mesh.pp.size)
    device = torch.device(device)
    model = _plan(config, axis, device, dtype, seed or 0, is_cut=part.stages > 1)
    cut(cast(Model, model), part)
    places = places_of(model)
    if not isinstance(model, PlainModel):
        draws, seed = cast(Model, model).distribution, None if device.type == "meta" else seed
        materialize(model, places, draws, axis=axis, dtype=dtype, device=device, seed=seed)
    else:
        _check_divided(config, places, axis)
    distribute(model, places, mesh.tp_mesh if mesh is not None else None)
    if mesh is not None:
        normalise_over(model, mesh.dp if config.synchronises else SINGLE)
    begin_training(model)
    return model


def outline(config: FamilyConfig, axis: Axis = SINGLE, stages: int = 1) -> ModelOutline:
    """Plan the whole model on the meta device for a rank of the tensor-parallel ``axis``, and return its outline.

    Raises ``ValueError`` for a model that cannot be divided over the axis, or cut into so many ``stages``.
    """
    model = _plan(config, axis, torch.device("meta"), torch.float32, 0, is_cut=stages > 1)
    Part(0, stages).blocks(len(cast(Model, model).blocks))
    if isinstance(model, PlainModel):
        _check_divided(config, places_of(model), axis)
    return read_outline(model, config, axis)


def _check_divided(config: FamilyConfig, places: Iterable[ParameterPlace], axis: Axis) -> None:
    """Raise ``ValueError`` for a plain module, in these places, that is whole on each of several ranks."""
    if axis.size > 1 and all(place.dimension is None for place in places):
        raise ValueError(
            f"family {config.family!r} builds no chain (an nn.ModuleDict `blocks`, with before_blocks and "
            f"after_blocks), which is what tensor parallelism divides; expected parallel.tp=1, got {axis.size}"
        )


def _plan(
    config: FamilyConfig, axis: Axis, device: torch.device, dtype: torch.dtype, seed: int, *, is_cut: bool
) -> nn.Module:
    """Return all blocks, not yet divided: planned on the meta device, or a module that was not written for that, with
    its values in ``dtype``.
    """
    builder: Builder = FAMILIES.function(config.family)
    construct = partial(builder, config, axis)
    unplanned: Exception | None = None
    try:
        with torch.device("meta"):
            planned = construct()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        unplanned = error  # of a constructor that looks at values, which only a plain module's may
    if unplanned is None and _is_chain(planned):
        check_planned(planned, is_cut=is_cut)
        return planned
    if unplanned is None and device.type == "meta":
        return PlainModel(config, planned, dtype)
    model = build_plain(config, construct, device=device, dtype=dtype, seed=seed)
    if unplanned is not None and _is_chain(model.blocks["0"]):
        raise unplanned
    return model


def _is_chain(module: nn.Module) -> bool:
    """Return whether a module was written as a :class:`Model`: many others have something that they call blocks."""
    return isinstance(getattr(module, "blocks", None), nn.ModuleDict) and hasattr(module, "before_blocks")
