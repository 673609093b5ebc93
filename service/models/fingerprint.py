"""Describes what a compile report holds for; the job that writes a gate and the job that obeys it share this."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping

import torch

from service.jobs.plugins.catalogue import HOUSE
from service.jobs.spec.base import PARALLEL_DIMENSIONS, ParallelSpec
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.model import ModelConfig
from service.models.parallelize import ModelRecipe

Fingerprint = dict[str, str | int | float]
ABSENT = "absent"


def fingerprint(config: ModelConfig, recipe: ModelRecipe, device: torch.device) -> Fingerprint:
    """Return model, mesh, precision, recomputation, torch version and device architecture as flat fields for JSON.

    The sharding counts where FSDP manages the model, and the pipeline where the recipe has one: which stages there are
    depends on it. Another version of the package that a family is installed with is another model.
    """
    fields: Fingerprint = {f"model.{name}": plain(value) for name, value in config.model_dump().items()}
    fields |= {f"precision.{name}": value for name, value in recipe.precision.model_dump().items()}
    fields["activation_checkpoint"] = recipe.activation_checkpoint
    family = FAMILIES.provided[config.family]
    if family.distribution != HOUSE:
        fields["model.package"] = f"{family.distribution} {family.version}"
    if recipe.is_sharded:
        fields |= {"sharding.reshard": recipe.sharding.reshard, "sharding.reduce": recipe.sharding.reduce}
    if recipe.pipeline is not None:
        fields["pipeline.schedule"] = recipe.pipeline.schedule
        fields["pipeline.virtual_stages"] = recipe.pipeline.stages_per_rank
    return fields | environment(recipe.parallel, device)


def environment(parallel: ParallelSpec, device: torch.device) -> Fingerprint:
    """Return mesh, torch version and device architecture, which belong to every fingerprint."""
    fields: Fingerprint = {f"parallel.{name}": getattr(parallel, name) for name in PARALLEL_DIMENSIONS}
    return fields | {"torch": torch.__version__, "device": device.type, "architecture": architecture(device)}


def architecture(device: torch.device) -> str:
    """Return what generated code depends on: ``sm_90 NVIDIA H200`` for a GPU, ``x86_64`` for a CPU."""
    if device.type != "cuda":
        return platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor} {torch.cuda.get_device_name(device)}"


def difference(
    recorded: Mapping[str, str | int | float], own: Mapping[str, str | int | float]
) -> list[tuple[str, str | int | float, str | int | float]]:
    """Return the fields that differ, as ``(field, recorded, own)`` by name; a missing one counts as ``absent``."""
    names = sorted(recorded.keys() | own.keys())
    pairs = ((name, recorded.get(name, ABSENT), own.get(name, ABSENT)) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2]]


def plain(value: object) -> str | int | float:
    """Return a value of a spec as a fingerprint writes it."""
    if isinstance(value, str | int | float):
        return value
    return "default" if value is None else json.dumps(value)
