"""What a compile report holds for: shared by the job that writes a gate and the job that obeys it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping

import torch

from service.jobs.plugins.catalogue import HOUSE
from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec, is_sharded
from service.jobs.spec.base import PARALLEL_DIMENSIONS, ParallelSpec
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.model import ModelConfig
from service.jobs.spec.train import PipelineSpec, ShardingSpec

Fingerprint = dict[str, str | int | float]
ABSENT = "absent"
SHARDED = ShardingSpec().settled(1)
"""Of a step with one micro-batch."""


def fingerprint(
    config: ModelConfig,
    parallel: ParallelSpec,
    device: torch.device,
    precision: PrecisionSpec,
    activation_checkpoint: ActivationCheckpoint,
    *,
    sharding: ShardingSpec = SHARDED,
    pipeline: PipelineSpec | None = None,
) -> Fingerprint:
    """Model, mesh, precision, recomputation, torch version and device architecture as flat fields, ready for JSON.

    ``sharding``, settled, counts where FSDP manages the model. ``pipeline`` is given where the model is cut into
    stages: which ones depends on it. Another version of the package that a family is installed with is another model.
    """
    fields: Fingerprint = {f"model.{name}": plain(value) for name, value in config.model_dump().items()}
    fields |= {f"precision.{name}": value for name, value in precision.model_dump().items()}
    fields["activation_checkpoint"] = activation_checkpoint
    family = FAMILIES.provided[config.family]
    if family.distribution != HOUSE:
        fields["model.package"] = f"{family.distribution} {family.version}"
    if is_sharded(parallel, precision):
        fields |= {"sharding.reshard": sharding.reshard, "sharding.reduce": sharding.reduce}
    if pipeline is not None:
        fields["pipeline.schedule"] = pipeline.schedule
        fields["pipeline.virtual_stages"] = pipeline.stages_per_rank
    return fields | environment(parallel, device)


def environment(parallel: ParallelSpec, device: torch.device) -> Fingerprint:
    """Mesh, torch version and device architecture: what holds whatever the subject is."""
    fields: Fingerprint = {f"parallel.{name}": getattr(parallel, name) for name in PARALLEL_DIMENSIONS}
    return fields | {"torch": torch.__version__, "device": device.type, "architecture": architecture(device)}


def architecture(device: torch.device) -> str:
    """What generated code depends on: ``sm_90 NVIDIA H200`` for a GPU, ``x86_64`` for a CPU."""
    if device.type != "cuda":
        return platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor} {torch.cuda.get_device_name(device)}"


def difference(
    recorded: Mapping[str, str | int | float], own: Mapping[str, str | int | float]
) -> list[tuple[str, str | int | float, str | int | float]]:
    """Fields in which the two differ, as ``(field, recorded, own)``, by name; a missing one counts as ``absent``."""
    names = sorted(recorded.keys() | own.keys())
    pairs = ((name, recorded.get(name, ABSENT), own.get(name, ABSENT)) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2]]


def plain(value: object) -> str | int | float:
    if isinstance(value, str | int | float):
        return value
    return "default" if value is None else json.dumps(value)
