"""Build the program that is checked from a spec: the job's model on its mesh, with its inputs and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from service import models
from service.compilation.program.base import Maker, Program, Site
from service.compilation.program.inputs import batches
from service.compilation.program.model import ModelProgram
from service.compilation.program.pipeline import PipelineProgram
from service.jobs.plugins import Features, ProgramConfig
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import PROGRAMS, CompileSpec
from service.jobs.spec.model import ModelConfig
from service.models.dotted import dotted
from service.models.fingerprint import Fingerprint, environment, fingerprint, plain
from service.models.parallelize import ModelRecipe, parallelize
from service.models.reference import resolve
from service.parallel import mesh as meshes
from service.parallel.fsdp import before_backward
from service.parallel.mesh import Axis, Mesh
from service.parallel.pipeline.channels import connect
from service.parallel.pipeline.stage import Part
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.schedules import generator


@dataclass(frozen=True)
class CheckedModel:
    """A job's model on this rank: how it is built and parallelized, and what is minimised.

    ``output_axis`` is the axis over which the logits are divided.
    """

    config: ModelConfig
    weights: models.Weights | None
    recipe: ModelRecipe
    mesh: Mesh
    output_axis: Axis
    device: torch.device
    seed: int

    def build(self, dtype: torch.dtype, part: Part | None = None) -> nn.Module:
        """Build this rank's ``part`` as a training job does, not yet compiled; its weights are drawn in float32.

        Any other ``dtype`` than float32 is exact: without mixed precision and float8.
        """
        model = models.build(self.config, self.mesh, device=self.device, seed=self.seed, part=part)
        if self.weights is not None:
            models.load_into(model, self.weights)
        model.to(dtype)
        parallelize(model, self.recipe if dtype is torch.float32 else self.recipe.exact(), self.mesh)
        return model

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of this rank's samples over the data-parallel ranks: FSDP sums gradients."""
        if isinstance(self.config.reads, Features):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return functional.cross_entropy(wide, targets) / self.mesh.dp.size
        return vocabulary_parallel_cross_entropy(logits, targets, self.output_axis) / self.mesh.dp.size


@dataclass(frozen=True)
class Subject:
    """Says what a gate will hold for, and what its report says of it."""

    fingerprint: Fingerprint
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """Holds the program of a compile job on this rank."""

    program: Program
    subject: Subject


def target_of(spec: CompileSpec, context: RunContext, device: torch.device) -> Target:
    """Raises ``ValueError`` for a mesh that was not started, or data that does not fit the model, before
    anything is compiled.
    """
    mesh = meshes.build(spec.parallel, device.type)
    if spec.program is not None:
        return _installed(spec.program, spec, Site(device, mesh, spec.seed, context.data))
    return _built(spec, context, device, mesh)


def _built(spec: CompileSpec, context: RunContext, device: torch.device, mesh: Mesh) -> Target:
    """Return the program of a model, as a training job runs it."""
    assert spec.model is not None  # a spec has one of both
    config, weights = resolve(spec.model, context.data)
    axis = cast(models.Model, models.build(config, mesh, device="meta")).output_axis
    recipe = ModelRecipe.from_spec(spec)
    model = CheckedModel(config, weights, recipe, mesh, axis, device, spec.seed)
    inputs = batches(spec, config, device, mesh.dp.rank, context.data)
    own = fingerprint(config, recipe, device)
    about = {"model": config.model_dump(mode="json"), "activation_checkpoint": recipe.activation_checkpoint}
    about |= {"precision": recipe.precision.model_dump(), "sharding": recipe.sharding.model_dump()}
    if recipe.pipeline is None:
        before = before_backward(recipe.sharding)
        return Target(ModelProgram(model.build, inputs, model.loss, spec.micro_batches, before), Subject(own, about))
    schedule = generator(recipe.pipeline.schedule)(spec.parallel.pp, recipe.pipeline.stages_per_rank, spec.forwards)
    channels = connect(mesh, schedule.owners)
    program = PipelineProgram(model.build, inputs, model.loss, mesh, schedule, channels)
    return Target(program, Subject(own, about | {"pipeline": recipe.pipeline.model_dump()}))


def _installed(config: ProgramConfig, spec: CompileSpec, site: Site) -> Target:
    """Return the program of an installed package; another version of the package is another program."""
    provided = PROGRAMS.provided[config.name]
    maker: Maker = dotted(provided.declaration.maker)
    described = config.model_dump(mode="json")
    fields = {f"program.{name}": plain(value) for name, value in described.items()}
    fields["program.package"] = f"{provided.distribution} {provided.version}"
    own = fields | environment(spec.parallel, site.device)
    return Target(maker(config, site), Subject(own, {"program": described}))
