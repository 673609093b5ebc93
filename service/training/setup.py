"""Builds the parts of a run before its first step, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from service.jobs.runtime import RunContext
from service.jobs.spec.compile import Phase
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.objective import Certified, CrossEntropy
from service.jobs.spec.train import TrainSpec
from service.models import ModelOutline, Weights, data, load_into
from service.models.compiled import COMPILE_MODES
from service.models.data import BatchOrder, Dataset, check_again, digest_of_labels, may_ignore, without_ignored
from service.models.parallelize import ModelRecipe, gate_fingerprints, keep_when_compiled, parallelize
from service.models.plain import PlainModel
from service.models.randomness import seed_all
from service.models.reference import fit, read
from service.models.registry import build, outline
from service.objectives import Objective, ObjectiveContext, objective_for
from service.parallel.boundary import StepBoundary
from service.parallel.collectives import agree
from service.parallel.fsdp import is_static
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.parallel.pipeline.stage import Part
from service.schedules import generator
from service.schedules.schedule import Schedule
from service.training.engine import Engine, SharesOfLabels, SharesOfSamples, build_engine
from service.training.gate import allowed_modes, load_caches, lowest_mode
from service.training.gradients import TiedStages
from service.training.optimizers import Updater, updater_for
from service.training.usage import UsageMetrics


@dataclass(frozen=True)
class TrainingInputs:
    """Holds the inputs of a run.

    ``outline`` is the whole model's, for the mesh of the run. ``compile_modes`` has a name of ``COMPILE_MODES`` for
    each compiled phase. ``labels`` is a digest of those in the data set. ``weights`` replace random ones. The gate was
    read for ``recipe``, which the model gets. ``state`` is the type of parameters, gradients and moments; a spec's
    precision means float32.
    """

    outline: ModelOutline
    dataset: Dataset
    compile_modes: dict[Phase, str]
    recipe: ModelRecipe
    labels: str = ""
    weights: Weights | None = None
    state: torch.dtype = torch.float32


@dataclass(frozen=True)
class Training:
    """Holds the parts of a run on this rank.

    ``stages`` are the rank's pipeline stages by number; without a pipeline there is one. ``outline`` is that of the
    whole model. ``origin`` is that of the weights, as checkpoints and exported models record it.
    """

    spec: TrainSpec
    context: RunContext
    device: torch.device
    mesh: Mesh
    outline: ModelOutline
    dataset: Dataset
    order: BatchOrder
    objective: Objective
    stages: Mapping[int, nn.Module]
    tied: TiedStages
    boundary: StepBoundary
    usage: UsageMetrics
    engine: Engine
    updater: Updater
    compile_modes: dict[Phase, str]
    origin: Mapping[str, Any]

    def seed(self, what: str, step: int) -> None:
        """Seed what draws numbers in a step or an evaluation: alike on the ranks of a tensor-parallel group, which
        compute the same, and differently on all others.
        """
        seed_all(self.spec.seed, what, step, self.mesh.pp.rank, self.mesh.dp.rank)


def prepare(spec: TrainSpec, context: RunContext, device: torch.device) -> Training:
    """Build, load and shard the model of ``spec``; every rank calls this, and nothing is written.

    Raises ``OnnxRefusedError`` on the first rank if the model could not be exported after the training.
    """
    check_batch(spec)
    mesh = build_mesh(spec.parallel, device.type)
    inputs = load_inputs(spec, context, device, mesh)
    context.report.phase("preparing")
    if spec.export.onnx and context.rank == 0:
        from service.models.onnx_file import try_onnx  # noqa: PLC0415 - onnxruntime takes long

        try_onnx(inputs.outline, inputs.dataset)
    return assemble(spec, context, device, mesh, inputs)


def check_batch(spec: TrainSpec) -> None:
    """Raise ``ValueError`` for a batch that the ranks cannot share equally: the losses of two layouts would differ."""
    share, rest = divmod(spec.batch.global_, spec.parallel.dp)
    if rest:
        raise ValueError(
            f"batch.global={spec.batch.global_} does not divide over dp_replicate·dp_shard = {spec.parallel.dp} ranks"
        )
    if share % spec.micro_batches:
        raise ValueError(
            f"batch.global={spec.batch.global_} gives each of {spec.parallel.dp} data-parallel ranks {share} samples, "
            f"which do not divide into {spec.micro_batches} micro-batches"
        )


def load_inputs(spec: TrainSpec, context: RunContext, device: torch.device, mesh: Mesh) -> TrainingInputs:
    """Load weights, data and compiled code that the spec names, outline the model, and read from the gate what may be
    compiled.
    """
    assert spec.model is not None and spec.data is not None  # noqa: PT018 - a spec without a program has both
    seed_all(spec.seed, "data")  # alike on all ranks, which must load the same
    config, held = read(spec.model, context.data)
    if spec.export.huggingface is not None and not isinstance(config, TransformerConfig):
        raise ValueError(
            f"export.huggingface={spec.export.huggingface!r} needs a transformer; "
            f"this model is of family {config.family!r}"
        )
    dataset = data.load(spec.data, context.data)
    needed = {"learn from": dataset.train}
    if isinstance(spec.objective, CrossEntropy | Certified):  # another may need none
        needed["test with"] = dataset.test
    for what, samples in needed.items():
        if not len(samples):
            raise ValueError(f"data.source={spec.data.source!r} gives no sample to {what}")
    check_again(dataset)
    labels = digest_of_labels(dataset)
    gives = f"data.source={spec.data.source!r} gives"
    agree({f"the labels that {gives}": labels, f"the digest of the samples that {gives}": dataset.sha256})
    model = outline(config, mesh.tp, mesh.pp.size)
    weights = fit(held, model)
    recipe = ModelRecipe.from_spec(spec)
    compile_modes: dict[Phase, str] = {}
    if spec.compile.gate is not None:
        fingerprints = gate_fingerprints(model, recipe, spec.objective, device)
        shape = (spec.forward_samples, *dataset.train.take(torch.zeros(1, dtype=torch.int64)).inputs.shape[1:])
        forwards, stages = spec.micro_batches, spec.stages
        compile_modes = allowed_modes(spec.compile, fingerprints, context.data, forwards, stages, shape=shape)
    load_caches(spec.compile, compile_modes, context)
    return TrainingInputs(model, dataset.to(device), compile_modes, recipe, labels, weights)


def assemble(
    spec: TrainSpec, context: RunContext, device: torch.device, mesh: Mesh, inputs: TrainingInputs
) -> Training:
    """Build the parts of a run over ``mesh`` from its inputs: objective, stages, engine and optimizer."""
    assert spec.data is not None
    asked = ObjectiveContext(inputs.outline.config, spec.data.gives, mesh, inputs.outline.output_axis)
    objective = objective_for(spec.objective, asked)
    dataset = _count_labels(spec, inputs.dataset, objective)
    schedule = _plan_pipeline(spec)
    owners = (0,) if schedule is None else schedule.owners
    stages = _build_stages(spec, context, device, mesh, inputs, objective=objective, owners=owners)
    boundary = StepBoundary({f"stage {number}": stage for number, stage in stages.items()})
    shares = SharesOfLabels(mesh.dp.group) if may_ignore(dataset.train) else SharesOfSamples(spec.batch.global_)
    engine = build_engine(stages, objective, spec, mesh, device, boundary=boundary, schedule=schedule, shares=shares)
    tells = mesh.dp.rank == 0 and mesh.tp.rank == 0
    return Training(
        spec=spec,
        context=context,
        device=device,
        mesh=mesh,
        outline=inputs.outline,
        dataset=dataset,
        order=BatchOrder(spec.seed, len(dataset.train), spec.batch.global_),
        objective=objective,
        stages=stages,
        tied=TiedStages.between(stages, inputs.outline.tied, owners, mesh),
        boundary=boundary,
        usage=UsageMetrics(spec.counters, context, boundary, tells=tells, micro_batches=spec.micro_batches),
        engine=engine,
        updater=updater_for(spec.optimizer, stages.values(), inputs.outline.parameters, device),
        compile_modes=inputs.compile_modes,
        origin={"parallel": spec.parallel.model_dump(), "data_sha256": dataset.sha256, "labels_sha256": inputs.labels},
    )


def _count_labels(spec: TrainSpec, dataset: Dataset, objective: Objective) -> Dataset:
    """Return the data set with labels that all count, unless the objective leaves out the ignored ones."""
    return dataset if objective.ignores else without_ignored(dataset, f"objective.name={spec.objective.name!r}")


def _plan_pipeline(spec: TrainSpec) -> Schedule | None:
    """Return the schedule of the pipeline's ranks; ``None`` without a pipeline."""
    if spec.parallel.pp == 1:
        return None
    pipeline = spec.pipeline
    return generator(pipeline.schedule)(spec.parallel.pp, pipeline.stages_per_rank, spec.micro_batches)


def _costs(spec: TrainSpec, inputs: TrainingInputs, stages: Iterable[nn.Module]) -> Iterator[str]:
    """Yield what a reader of the spec may not expect of the memory that the stages take."""
    stages = list(stages)
    checkpoint = spec.activation_checkpoint
    if inputs.compile_modes and checkpoint != "none" and any(map(keep_when_compiled, stages)):
        kept = "blocks that hold buffers, such as running statistics, keep their activations where they are compiled"
        yield f"activation_checkpoint={checkpoint!r}: {kept}"
    chains = [stage for stage in stages if not (is_static(stage) or isinstance(stage, PlainModel))]
    if chains and inputs.recipe.is_sharded:
        gathered = "its blocks are gathered together, as it does not say is_static = True"
        yield f"parallel.dp_shard={spec.parallel.dp_shard}: {type(chains[0]).__name__.removeprefix('FSDP')}: {gathered}"


def _build_stages(
    spec: TrainSpec,
    context: RunContext,
    device: torch.device,
    mesh: Mesh,
    inputs: TrainingInputs,
    *,
    objective: Objective,
    owners: Sequence[int],
) -> dict[int, nn.Module]:
    """Build the stages that this rank owns, by number: draw or load their weights, and apply the recipe to them. Log
    what they cost.
    """
    modes = inputs.compile_modes
    stages = {}
    for part in (Part(stage, len(owners)) for stage, owner in enumerate(owners) if owner == mesh.pp.rank):
        stage = build(inputs.outline.config, mesh, dtype=inputs.state, device=device, seed=spec.seed, part=part)
        if inputs.weights is not None and spec.resume is None:
            load_into(stage, inputs.weights)
        objective.adapt(stage, part)
        compile_mode = COMPILE_MODES[lowest_mode(modes)] if modes else None
        parallelize(stage, inputs.recipe, mesh, units=objective.units(stage), compile_mode=compile_mode)
        stages[part.stage] = stage
    for line in _costs(spec, inputs, stages.values()):
        context.report.log(line)
    return stages
