"""Builds the checked program from a spec: the job's model on its mesh, with its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from service import models
from service.compilation.instruments.profile import free_bytes
from service.compilation.program.model import ModelProgram, SampleBatch
from service.compilation.program.pipeline import PipelineProgram
from service.jobs.files import DataLayout
from service.jobs.plugins import Features, Tokens
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import ModelConfig, ModelRef
from service.models import data
from service.models.data import Split
from service.models.parallelize import Fingerprint, ModelRecipe, fingerprint, parallelize
from service.models.program import Program, Site, make
from service.models.reference import HeldWeights, fit, read
from service.models.registry import outline
from service.objectives import Objective, ObjectiveContext, objective_for
from service.parallel import mesh as meshes
from service.parallel.fsdp import before_backward
from service.parallel.mesh import Mesh
from service.parallel.pipeline.stage import Part
from service.parallel.pipeline.transport import connect
from service.schedules import generator

Reader = Callable[[ModelRef, DataLayout], tuple[ModelConfig, HeldWeights]]
_KEPT_SHARE = 0.05
"""The share of a device's free memory that weights may take beside the model, which is built for every run."""


@dataclass(frozen=True)
class _CheckedModel:
    """A job's model on this rank: its construction, its parallelism and its loss."""

    config: ModelConfig
    weights: models.Weights | None
    recipe: ModelRecipe
    mesh: Mesh
    objective: Objective
    device: torch.device
    seed: int

    def build(self, dtype: torch.dtype, part: Part | None = None) -> nn.Module:
        """Build this rank's ``part`` as a training job does, not yet compiled; its weights are drawn in float32.

        Any other ``dtype`` than float32 is exact: without mixed precision and float8.
        """
        seed = self.seed if self.weights is None else None  # what is loaded is not drawn before
        model = models.build(self.config, self.mesh, device=self.device, seed=seed, part=part)
        if self.weights is not None:
            models.load_into(model, self.weights)
        model.to(dtype)
        self.objective.adapt(model, part or Part())
        recipe = self.recipe if dtype is torch.float32 else self.recipe.exact()
        parallelize(model, recipe, self.mesh, units=self.objective.units(model))
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean objective of this rank's samples over the data-parallel ranks: FSDP sums gradients."""
        return self.objective.mean(outputs, targets) / self.mesh.dp.size


@dataclass(frozen=True)
class Subject:
    """Identifies the program that a gate holds for, and describes it for the report."""

    fingerprint: Fingerprint
    about: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of a model's input in one forward of this rank; a program's job compares its calls one by one."""


@dataclass(frozen=True)
class Target:
    """Holds the program of a compile job on this rank."""

    program: Program
    subject: Subject


def target_of(spec: CompileSpec, context: RunContext, device: torch.device, reader: Reader = read) -> Target:
    """Return the spec's program, of a model that ``reader`` finds.

    Raises ``ValueError`` for a mesh that was not started, or that cannot divide the model, or data that does not fit
    it, before anything is compiled.
    """
    mesh = meshes.build(spec.parallel, device.type)
    if spec.program is not None:
        program, own = make(spec.program, spec.parallel, Site(device, mesh, spec.seed, context.data))
        return Target(program, Subject(own, {"program": spec.program.model_dump(mode="json")}))
    return _model_target(spec, context, device, mesh, reader)


def _model_target(spec: CompileSpec, context: RunContext, device: torch.device, mesh: Mesh, reader: Reader) -> Target:
    """Return the program of a model, as a training job runs it."""
    assert spec.model is not None  # a spec has one of the two
    config, held = reader(spec.model, context.data)
    whole = outline(config, mesh.tp, mesh.pp.size)
    weights = fit(held, whole)
    if weights is not None and device.type == "cuda":
        weights = models.KeptWeights(weights, device, int(_KEPT_SHARE * free_bytes(device)))
    recipe = ModelRecipe.from_spec(spec)
    own = fingerprint(config, recipe, device, spec.objective)
    samples = config.reads if spec.data is None else spec.data.gives
    objective = objective_for(spec.objective, ObjectiveContext(config, samples, mesh, whole.output_axis))
    objective.begin(0)
    model = _CheckedModel(config, weights, recipe, mesh, objective, device, spec.seed)
    inputs = batches(spec, config, device, mesh.dp.rank, context.data)
    about = {"model": config.model_dump(mode="json"), "activation_checkpoint": recipe.activation_checkpoint}
    about |= {
        "objective": spec.objective.model_dump(mode="json"),
        "precision": recipe.precision.model_dump(),
        "sharding": recipe.sharding.model_dump(),
    }
    subject = Subject(own, about, tuple((count, *inputs[0].inputs[0].shape[1:]) for count in spec.shapes))
    if recipe.pipeline is None:
        before = before_backward(recipe.sharding)
        return Target(ModelProgram(model.build, inputs, model.loss, spec.micro_batches, before, mesh.dp.group), subject)
    schedule = generator(recipe.pipeline.schedule)(spec.parallel.pp, recipe.pipeline.stages_per_rank, spec.forwards)
    channels = connect(mesh, schedule.owners)
    program = PipelineProgram(model.build, inputs, model.loss, mesh, schedule, channels)
    return Target(program, replace(subject, about=about | {"pipeline": recipe.pipeline.model_dump()}))


def batches(
    spec: CompileSpec, config: ModelConfig, device: torch.device, part: int = 0, layout: DataLayout | None = None
) -> tuple[SampleBatch, ...]:
    """Return ``spec.steps`` batches or a few more, each of ``spec.forwards`` forwards with the sizes of ``spec.shapes``
    in turn: whole turns, so that any ``len(spec.shapes)`` steps in a row have all of them.

    ``part`` is the data-parallel rank: each sees samples of its own. ``layout`` has uploaded files. Raises
    ``ValueError`` when the data set does not fit the model.
    """
    turns = -(-spec.steps // len(spec.shapes))
    sizes = [size * spec.forwards for size in turns * spec.shapes]
    samples = _samples(spec, config, sum(sizes), part, layout)
    pieces = zip(torch.split(samples.inputs, sizes), torch.split(samples.targets, sizes), strict=True)
    return tuple(SampleBatch((inputs.to(device),), targets.to(device)) for inputs, targets in pieces)


def _samples(spec: CompileSpec, config: ModelConfig, count: int, part: int, layout: DataLayout | None) -> Split:
    if spec.data is None:
        return _random_samples(config, count, spec.seed + part)
    samples = data.load(spec.data, layout).train
    taken = samples.take(torch.arange(part * count, (part + 1) * count) % len(samples))
    _check_fit(taken, config)
    return taken


def _random_samples(config: ModelConfig, count: int, seed: int) -> Split:
    """Return standard normal features with random classes, or random tokens over the longest sequence."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    reads = config.reads
    if isinstance(reads, Features):
        inputs = torch.randn(count, reads.features, generator=generator)
        return Split(inputs, integers(reads.classes, count))
    tokens = integers(reads.vocabulary, count, reads.sequence + 1)
    return Split(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _check_fit(split: Split, config: ModelConfig) -> None:
    """Raise ``ValueError`` naming the field unless the samples fit the model."""
    reads = config.reads
    if isinstance(reads, Features):
        _check_features(split, config.family, reads)
    else:
        _check_tokens(split, config.family, reads)


def _check_features(split: Split, family: str, reads: Features) -> None:
    if not split.inputs.is_floating_point():
        raise ValueError(f"data: a model of family {family} reads features; expected a source of them, got tokens")
    features, classes = split.inputs.shape[1], int(split.targets.max()) + 1
    if features != reads.features:
        raise ValueError(_misfit(reads.features_field, "features", reads.features, f"{features} features"))
    if classes > reads.classes:
        raise ValueError(_misfit(reads.classes_field, "classes", reads.classes, f"{classes} classes"))


def _check_tokens(split: Split, family: str, reads: Tokens) -> None:
    if split.inputs.is_floating_point():
        raise ValueError(f"data: a model of family {family} reads tokens; expected a source of them, got features")
    sequence, highest = split.inputs.shape[1], int(split.inputs.max())
    if sequence > reads.sequence:
        longest = reads.sequence_field or "the longest sequence"
        raise ValueError(f"data.sequence={sequence} is longer than model.{longest}={reads.sequence}")
    if highest >= reads.vocabulary:
        raise ValueError(_misfit(reads.vocabulary_field, "vocabulary", reads.vocabulary, f"tokens up to {highest}"))


def _misfit(field: str | None, name: str, built: int, given: str) -> str:
    return f"model.{field or name}={built}, but the data has {given}"
