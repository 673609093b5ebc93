"""Outlines a model: what the steps of a job ask of the whole of it, read once from its plan on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import nn

from service.jobs.plugins import ModelConfig
from service.models.plain import PlainModel
from service.parallel.mesh import Axis
from service.parallel.tensor.placement import places_of, state_buffers

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelOutline:
    """Holds what a whole model is, without any tensor.

    ``parameters`` and ``buffers`` have the shapes of what its checkpoints hold, each once and without padding, by its
    name in every layout. ``elsewhere`` has the other places of parameters, with that name; ``tied`` those of them that
    may lie in two stages of a pipeline. ``rows`` are, of each parameter that is padded on this mesh, those before the
    padding. ``output_axis`` divides the last dimension of the outputs. ``is_plain``: the model is made of a module that
    was not written as a chain of blocks.
    """

    config: ModelConfig
    parameters: Mapping[str, Shape]
    buffers: Mapping[str, Shape]
    elsewhere: Mapping[str, str]
    tied: Mapping[str, str]
    rows: Mapping[str, int]
    output_axis: Axis
    blocks_alike: bool
    is_plain: bool

    @cached_property
    def elements(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(map(prod, self.parameters.values()))

    @property
    def state_elements(self) -> int:
        """Return the number of elements in a state dict of the model, which repeats what has several places."""
        repeated = sum(prod(self.parameters[name]) for name in self.elsewhere.values())
        return self.elements + repeated + sum(map(prod, self.buffers.values()))


def read_outline(model: nn.Module, config: ModelConfig, axis: Axis) -> ModelOutline:
    """Return the outline of a whole model that is planned for a rank of the tensor-parallel ``axis``."""
    if (output_axis := getattr(model, "output_axis", None)) is None:
        raise ValueError(
            f"{type(model).__name__} has no output_axis; expected the axis that divides the last dimension of its "
            "outputs, service.parallel.mesh.SINGLE where none does"
        )
    places = places_of(model)
    every = dict(model.named_parameters(remove_duplicate=False))
    known = {id(every[place.name]): place.known for place in places}
    parameters: dict[str, Shape] = {}
    for place in places:
        parameters.setdefault(place.known, place.unpadded(axis))
    return ModelOutline(
        config,
        parameters=parameters,
        buffers={name: tuple(buffer.shape) for name, buffer in state_buffers(model)},
        elsewhere={name: known[id(parameter)] for name, parameter in every.items() if name not in parameters},
        tied={place.name: place.known for place in places if place.name != place.known},
        rows={place.known: place.padded.length for place in places if place.padded is not None},
        output_axis=output_axis,
        blocks_alike=getattr(model, "blocks_alike", False),
        is_plain=isinstance(model, PlainModel),
    )
