"""From a spec to the program that is checked: the job's model on its mesh, with its inputs and its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from service import models
from service.compilation.inputs import batches
from service.compilation.program import Program
from service.jobs.runtime import RunContext
from service.jobs.spec.base import ParallelSpec
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import FromJob, MlpConfig, TransformerConfig
from service.parallel import mesh as meshes
from service.parallel.mesh import Axis, Mesh
from service.parallel.tensor import vocabulary_parallel_cross_entropy

Config = MlpConfig | TransformerConfig


@dataclass(frozen=True)
class Built:
    """The program, and the configuration that its gate will hold for."""

    program: Program
    config: Config


def program_of(spec: CompileSpec, context: RunContext, device: torch.device) -> Built:
    """Build the program of a compile job on this rank.

    Raises ``ValueError`` for a mesh that cannot be checked yet, or data that does not fit the model, before
    anything is compiled.
    """
    check_mesh(spec.parallel)
    config, weights = _resolve(spec, context)
    mesh = meshes.build(spec.parallel, device.type)
    axis: Axis = models.build(config, mesh, device="meta").output_axis  # type: ignore[assignment]
    program = Program(
        build=lambda: _build(config, weights, mesh, device, spec.seed),
        batches=batches(spec, config, device, mesh.dp.rank),
        loss=_class_loss
        if isinstance(config, MlpConfig)
        else lambda logits, targets: _token_loss(logits, targets, axis),
        seed=spec.seed,
    )
    return Built(program, config)


def check_mesh(parallel: ParallelSpec) -> None:
    """Raise ``ValueError`` for the degrees that the ladder cannot climb yet: all but ``tp``."""
    for name in ("pp", "dp_replicate", "dp_shard"):
        if getattr(parallel, name) > 1:
            raise ValueError(
                f"parallel.{name}={getattr(parallel, name)}: a compile job checks one process or a tensor-parallel "
                f"group; expected {name}=1"
            )


def _resolve(spec: CompileSpec, context: RunContext) -> tuple[Config, dict[str, Tensor] | None]:
    if isinstance(spec.model, FromJob):
        return models.load_whole(context.data.job(spec.model.job), spec.model.step)
    return spec.model, None


def _build(config: Config, weights: dict[str, Tensor] | None, mesh: Mesh, device: torch.device, seed: int) -> nn.Module:
    model = models.build(config, mesh, device=device, seed=seed)
    if weights is not None:
        models.load_into(model, weights)
    return model


def _class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets)


def _token_loss(logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
    return vocabulary_parallel_cross_entropy(logits, targets, axis)
