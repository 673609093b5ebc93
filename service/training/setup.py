"""Everything that a run needs before its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import AdamW

from service.jobs.runtime import RunContext
from service.jobs.spec.arithmetic import is_sharded
from service.jobs.spec.model import ModelConfig
from service.jobs.spec.objective import CrossEntropy
from service.jobs.spec.train import TrainSpec
from service.models import Model, Weights, build, data, load_into
from service.models.compiled import RECIPES, compiles_blocks
from service.models.data import BatchOrder, Dataset
from service.models.fingerprint import Fingerprint, fingerprint
from service.models.reference import resolve
from service.parallel import mesh as meshes
from service.parallel.boundary import Held, StepBoundary
from service.parallel.mesh import Mesh
from service.parallel.pipeline.stage import Part
from service.schedules.schedule import Schedule
from service.training.engine import Engine, build_engine, plan_pipeline
from service.training.export import check_export
from service.training.flops import count_parameters
from service.training.gate import Phase, allowed_modes, lowest, portable_caches
from service.training.objective import Objective, Subject, objective_for
from service.training.parallelize import parallelize

AUDIT_EVERY = 500
"""Steps from one look for results held over a replay to the next; a look takes 0.1 s or more."""


@dataclass(frozen=True)
class Training:
    """The parts of a run, on this rank. ``stages`` are its pipeline stages by number, one without a pipeline;
    ``parameters`` counts the whole model.
    """

    spec: TrainSpec
    context: RunContext
    device: torch.device
    mesh: Mesh
    config: ModelConfig
    dataset: Dataset
    order: BatchOrder
    objective: Objective
    stages: Mapping[int, nn.Module]
    boundary: StepBoundary
    engine: Engine
    optimizer: AdamW
    backends: dict[Phase, str]
    parameters: int

    @property
    def origin(self) -> dict[str, Any]:
        """Where weights come from, as checkpoints and exported models tell it."""
        return {"parallel": self.spec.parallel.model_dump(), "data_sha256": self.dataset.sha256}


@dataclass(frozen=True)
class Ingredients:
    """What a run is made of before anything is built. ``weights`` replace the drawn ones; ``state`` is the type of
    parameters, gradients and moments (float32 is what a spec's precision means).
    """

    config: ModelConfig
    dataset: Dataset
    backends: dict[Phase, str]
    weights: Weights | None = None
    state: torch.dtype = torch.float32


def prepare(spec: TrainSpec, context: RunContext, device: torch.device) -> Training:
    """Build, load and shard the model; nothing is written."""
    check_batch(spec)
    mesh = meshes.build(spec.parallel, device.type)
    config, weights = resolve(spec.model, context.data)
    check_export(spec.export, config)
    dataset = data.load(spec.data, context.data).to(device)
    prints = [own_fingerprint(config, spec, device), staged_fingerprint(config, spec, device)]
    backends = allowed_modes(spec.compile, prints, context.data, spec.micro_batches, spec.stages)
    load_caches(spec, context, backends)
    return assemble(spec, context, device, mesh, Ingredients(config, dataset, backends, weights))


def load_caches(spec: TrainSpec, context: RunContext, backends: Mapping[Phase, str]) -> None:
    """What the gate's job compiled need not be compiled again; what can't be read is. Each rank tells which."""
    if not backends:
        return
    code = f"rank {context.rank}: compiled code of {spec.compile.gate}"
    caches = portable_caches(spec.compile, backends, context.data, context.rank, context.gate_artifacts)
    if not caches:
        mode = lowest(backends)
        context.report.log(
            f"{code} not usable: none was kept for this rank in {mode} by a job of the same owner, or it was changed"
        )
        return
    loaded = [torch.compiler.load_cache_artifacts(cache) for cache in caches]
    is_whole = all(each is not None for each in loaded)  # none of one whose checksum is wrong
    context.report.log(f"{code} {'loaded' if is_whole else 'not usable: it is damaged, and compiled again'}")


def assemble(spec: TrainSpec, context: RunContext, device: torch.device, mesh: Mesh, given: Ingredients) -> Training:
    """The run over ``mesh``, from its ingredients."""
    config, dataset = given.config, given.dataset
    planned = cast(Model, build(config, mesh, device="meta", part=Part()))
    objective = objective_for(spec.objective, Subject(config, spec.data.gives, mesh, planned.output_axis))
    stages = {
        part.stage: _build_stage(part, spec, device, mesh, given, objective=objective)
        for part in own_parts(plan_pipeline(spec), mesh)
    }
    boundary = build_boundary(stages, given.backends, context)
    return Training(
        spec=spec,
        context=context,
        device=device,
        mesh=mesh,
        config=config,
        dataset=dataset,
        order=BatchOrder(spec.seed, len(dataset.train), spec.batch.global_),
        objective=objective,
        stages=stages,
        boundary=boundary,
        engine=build_engine(stages, objective, spec, mesh, device, boundary=boundary),
        optimizer=build_optimizer(stages.values(), spec, device),
        backends=given.backends,
        parameters=count_parameters(build(config, device="meta")),
    )


def build_boundary(stages: Mapping[int, nn.Module], backends: Mapping[Phase, str], context: RunContext) -> StepBoundary:
    """Where the loop's steps begin; audited from time to time where CUDA graphs reuse what a step has made."""

    def tell(held: tuple[Held, ...]) -> None:
        for each in held:
            context.report.log(f"rank {context.rank}: the next replays overwrite what is still held: {each}")

    replayed = any(RECIPES[backend].cuda_graphs for backend in backends.values())
    modules = {f"stage {number}": stage for number, stage in stages.items()}
    return StepBoundary(modules, audit_every=AUDIT_EVERY if replayed else 0, on_held=tell)


def own_parts(schedule: Schedule | None, mesh: Mesh) -> list[Part]:
    """The parts of the model that this rank holds, by the schedule's assignment."""
    owners = (0,) if schedule is None else schedule.owners
    return [Part(stage, len(owners)) for stage, owner in enumerate(owners) if owner == mesh.pp.rank]


def _build_stage(
    part: Part, spec: TrainSpec, device: torch.device, mesh: Mesh, given: Ingredients, *, objective: Objective
) -> nn.Module:
    model = build(given.config, mesh, dtype=given.state, device=device, seed=spec.seed, part=part)
    if given.weights is not None:
        load_into(model, given.weights)
    objective.adapt(model, part)
    parallelize(model, spec, mesh, given.backends, objective.units(model))
    return model


def own_fingerprint(config: ModelConfig, spec: TrainSpec, device: torch.device) -> Fingerprint:
    """What a gate must have been written for. Compile jobs minimise cross entropy, so any other objective is a field
    that their reports lack.
    """
    parallel = spec.parallel
    if compiles_blocks(build(config, device="meta"), sharded=is_sharded(spec.parallel, spec.precision)):
        # Compile jobs check a model in one piece. Block by block, its graphs are those of any stage that holds them.
        parallel = parallel.model_copy(update={"pp": 1})
    own = fingerprint(
        config, parallel, device, spec.precision, spec.activation_checkpoint, sharding=spec.settled_sharding
    )
    if spec.objective != CrossEntropy():
        own["objective"] = spec.objective.name
    return own


def staged_fingerprint(config: ModelConfig, spec: TrainSpec, device: torch.device) -> Fingerprint | None:
    """What a gate may have been written for instead: the very stages of this job. ``None`` without a pipeline."""
    if spec.parallel.pp == 1:
        return None
    own = fingerprint(
        config,
        spec.parallel,
        device,
        spec.precision,
        spec.activation_checkpoint,
        sharding=spec.settled_sharding,
        pipeline=spec.pipeline,
    )
    if spec.objective != CrossEntropy():
        own["objective"] = spec.objective.name
    return own


def check_batch(spec: TrainSpec) -> None:
    """Refuse a batch that the ranks can't share equally: the losses of two layouts would differ."""
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


def build_optimizer(stages: Iterable[nn.Module], spec: TrainSpec, device: torch.device) -> AdamW:
    """AdamW with one kernel for all parameters on CUDA, and one call per operation for all of them elsewhere."""
    return AdamW(
        [parameter for stage in stages for parameter in stage.parameters()],
        lr=spec.optimizer.lr,
        betas=spec.optimizer.betas,
        eps=spec.optimizer.eps,
        weight_decay=spec.optimizer.weight_decay,
        **{"fused" if device.type == "cuda" else "foreach": True},
    )
