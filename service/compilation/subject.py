"""From a spec to the program that is checked: the job's model on its mesh, with its inputs and its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from service import models
from service.compilation.inputs import batches
from service.compilation.model_program import ModelProgram
from service.compilation.program import Program
from service.jobs.plugins import Features
from service.jobs.runtime import RunContext
from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import ModelConfig
from service.models.recompute import apply_activation_checkpoint
from service.models.reference import resolve
from service.parallel import mesh as meshes
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.mesh import Axis, Mesh
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.parallel.tensor.float8 import use_float8


@dataclass(frozen=True)
class Subject:
    """A job's model on this rank: how it is built, and what is minimised.

    ``output_axis`` is the axis over which the logits are divided.
    """

    config: ModelConfig
    weights: dict[str, Tensor] | None
    mesh: Mesh
    output_axis: Axis
    device: torch.device
    seed: int
    precision: PrecisionSpec
    activation_checkpoint: ActivationCheckpoint

    def build(self, dtype: torch.dtype) -> nn.Module:
        """This rank's part, in the precision, recomputing and sharded as in a training job; drawn in float32.

        Any other ``dtype`` than float32 is exact: without mixed precision and float8.
        """
        model = models.build(self.config, self.mesh, device=self.device, seed=self.seed)
        if self.weights is not None:
            models.load_into(model, self.weights)
        model.to(dtype)
        used = self.precision if dtype is torch.float32 else PrecisionSpec()
        if used.float8:
            use_float8(model)
        if self.activation_checkpoint != "none":
            apply_activation_checkpoint(model, self.activation_checkpoint)
        precision = Precision.from_spec(used)
        return apply_fsdp(model, self.mesh, precision) if self.mesh.dp.size > 1 or precision != Precision() else model

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of this rank's samples over the data-parallel ranks, as FSDP sums gradients."""
        if isinstance(self.config.reads, Features):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return functional.cross_entropy(wide, targets) / self.mesh.dp.size
        return vocabulary_parallel_cross_entropy(logits, targets, self.output_axis) / self.mesh.dp.size


def program_of(spec: CompileSpec, context: RunContext, device: torch.device) -> tuple[Program, ModelConfig]:
    """The program of a compile job on this rank, and the configuration that its gate will hold for.

    Raises ``ValueError`` for a mesh that was not started, or data that does not fit the model, before
    anything is compiled.
    """
    config, weights = resolve(spec.model, context.data)
    mesh = meshes.build(spec.parallel, device.type)
    axis = cast(models.Model, models.build(config, mesh, device="meta")).output_axis
    subject = Subject(config, weights, mesh, axis, device, spec.seed, spec.precision, spec.activation_checkpoint)
    inputs = batches(spec, config, device, mesh.dp.rank, context.data)
    return ModelProgram(subject.build, inputs, subject.loss), config
