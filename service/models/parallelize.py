"""Applies the recipe that turns a built model into the one that runs on the mesh.

A training job applies it, and a compile check applies the same function to the model that it certifies. The steps:

1. tensor parallelism and the pipeline cut, inside ``service.models.build``;
2. ``apply_float8``: the matrix products of linear layers in float8;
3. ``apply_activation_checkpoint``: recomputation, block by block;
4. ``apply_fsdp``: FSDP2, unit by unit and then what remains;
5. ``apply_compile``: ``torch.compile``, unit by unit, so that FSDP's hooks stay outside the graphs. The compile check
   leaves this step to its ladder, which calls the same function with one mode after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec, is_sharded
from service.jobs.spec.base import ParallelSpec
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import PipelineSpec, ShardingSpec, TrainSpec
from service.models.compiled import CompileMode, apply_compile
from service.models.recompute import apply_activation_checkpoint
from service.parallel.fsdp import Precision, apply_fsdp
from service.parallel.mesh import Mesh
from service.parallel.tensor.float8 import apply_float8

_ONE_MICRO_BATCH = ShardingSpec().resolved(1)


@dataclass(frozen=True)
class ModelRecipe:
    """Everything in a spec that decides how its model is computed.

    ``sharding`` is resolved for the number of micro-batches. ``pipeline`` is ``None`` for a model in one piece.
    """

    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    sharding: ShardingSpec = _ONE_MICRO_BATCH
    activation_checkpoint: ActivationCheckpoint = "none"
    pipeline: PipelineSpec | None = None

    @staticmethod
    def from_spec(spec: TrainSpec | CompileSpec) -> ModelRecipe:
        return ModelRecipe(
            parallel=spec.parallel,
            precision=spec.precision,
            sharding=spec.resolved_sharding,
            activation_checkpoint=spec.activation_checkpoint,
            pipeline=spec.pipeline if spec.parallel.pp > 1 else None,
        )

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 manages the model."""
        return is_sharded(self.parallel, self.precision)

    def exact(self) -> ModelRecipe:
        """Return the recipe without mixed precision and float8, for a float64 reference."""
        return replace(self, precision=PrecisionSpec())


def parallelize(
    model: nn.Module,
    recipe: ModelRecipe,
    mesh: Mesh,
    *,
    units: Iterable[nn.Module] | None = None,
    compile_mode: CompileMode | None = None,
) -> None:
    """Apply ``recipe`` in place to ``model``, a whole model or a pipeline stage, on its device.

    ``units`` are the modules that the forward calls as a whole, which FSDP gathers one by one; the blocks when absent.
    Without ``compile_mode`` nothing is compiled.
    """
    if recipe.precision.float8:
        apply_float8(model)
    if recipe.activation_checkpoint != "none":
        apply_activation_checkpoint(model, recipe.activation_checkpoint)
    if recipe.is_sharded:
        reshard = recipe.sharding.reshard == "always"
        apply_fsdp(model, mesh, Precision.from_spec(recipe.precision), reshard=reshard, units=units)
    if compile_mode is not None:
        apply_compile(model, compile_mode.backend, compile_mode.mode)
