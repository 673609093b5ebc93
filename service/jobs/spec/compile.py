"""Defines the spec of a compile check, of a model, of an exported module or of a program from an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec
from service.jobs.spec.common import CommonSpec, Dependency, Strict, disagreement
from service.jobs.spec.data import DataSpec
from service.jobs.spec.model import ModelRef, jobs_of
from service.jobs.spec.objective import CrossEntropy, ObjectiveSpec
from service.jobs.spec.program import ProgramRef
from service.jobs.spec.train import PipelineSpec, ShardingSpec

Mode = Literal["eager", "aot_eager", "aot_eager_decomp_partition", "inductor", "reduce-overhead"]
Phase = Literal["train", "inference"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The names of all rungs, in the order in which they are climbed."""
_OF_A_MODEL = (
    "data",
    "objective",
    "shapes",
    "micro_batches",
    "pipeline",
    "precision",
    "sharding",
    "activation_checkpoint",
)

_FORMER_DEFAULTS: Mapping[str, object] = {"shapes": (16,)}
"""What specs hold that an older version wrote out."""


class Tolerance(Strict):
    """A compiled run may differ from eager by this much, or be this many times further from float64 than eager is."""

    absolute: float = Field(1e-4, gt=0, description="the smallest difference from eager PyTorch that counts")
    ratio: float = Field(2.0, ge=1, description="the factor by which it may exceed what rounding explains")


class CompileSpec(CommonSpec):
    """Find the highest safe ``torch.compile`` rung for ``model``, or for a ``program``, per phase."""

    kind: Literal["compile"] = Field("compile", description="a compile check")
    model: ModelRef | None = Field(None, description="the model to check, unless a program is checked")
    program: ProgramRef | None = Field(
        None, description="an exported module, or a program of an installed package: modules and their steps"
    )
    data: DataSpec | None = Field(None, description="source of real inputs; random ones that fit when absent")
    objective: ObjectiveSpec = Field(
        CrossEntropy(),
        exclude_if=lambda objective: (
            objective == CrossEntropy()
        ),  # a worker of an older version does not know the field
        description="what the model minimises, as in the training that the gate is for",
    )
    modes: tuple[Mode, ...] = Field(MODES, min_length=1, fail_fast=True, description="rungs to climb, from eager up")
    phases: tuple[Phase, ...] = Field(
        ("train", "inference"), min_length=1, fail_fast=True, description="training steps, or forwards alone"
    )
    steps: int = Field(4, ge=2, le=1000, description="iterations per rung and phase")
    shapes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64,), min_length=1, description="numbers of samples of a forward, in turn: that of the training is one of them"
    )
    micro_batches: int = Field(1, ge=1, le=1024, description="forwards per step, whose gradients add up")
    pipeline: PipelineSpec = PipelineSpec()
    tolerance: Tolerance = Tolerance()
    fullgraph: bool = Field(False, description="whether a break of a graph is a failure, as for torch.compile")
    precision: PrecisionSpec = PrecisionSpec()
    sharding: ShardingSpec = ShardingSpec()
    activation_checkpoint: ActivationCheckpoint = Field(
        "none", description="activations that a backward computes again, as in the training that the gate is for"
    )

    @property
    def forwards(self) -> int:
        """Return the number of micro-batches of a step."""
        if self.parallel.pp == 1:
            return self.micro_batches
        return self.pipeline.micro_batches or 2 * self.parallel.pp

    @property
    def resolved_sharding(self) -> ShardingSpec:
        """Return ``sharding`` as the checked steps run it."""
        return self.sharding.resolved(self.forwards)

    @property
    def permitted(self) -> Tolerance:
        """Return the tolerance that was given, or by default a wider one for arithmetic coarser than float32's."""
        coarse = self.precision.param != "fp32" or self.precision.float8
        given = "tolerance" in self.model_fields_set
        return Tolerance(absolute=1e-3, ratio=3) if coarse and not given else self.tolerance

    @model_serializer(mode="wrap")
    def _write_tolerance_if_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a tolerance that was not given, so that a reader knows."""
        written: dict[str, Any] = write(self)
        if "tolerance" not in self.model_fields_set:
            written.pop("tolerance", None)
        return written

    @property
    def stages(self) -> int:
        """Return the number of pieces into which the model is cut; 1 without a pipeline."""
        return 1 if self.parallel.pp == 1 else self.parallel.pp * self.pipeline.stages_per_rank

    def dependencies(self) -> tuple[Dependency, ...]:
        """Return the model's job, and those of ``after``."""
        return (*jobs_of(self.model), *super().dependencies())

    @field_validator("modes")
    @classmethod
    def _climbs(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        if modes[0] != MODES[0] or list(modes) != sorted(set(modes), key=MODES.index):
            raise ValueError(f"modes climb the ladder from its foot: some of {', '.join(MODES)}, in this order")
        return modes

    @field_validator("phases")
    @classmethod
    def _each_once(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        if len(set(phases)) < len(phases):
            raise ValueError("a phase is there twice; expected train, inference or both, each once")
        return phases

    @model_validator(mode="after")
    def _one_subject(self) -> CompileSpec:
        if (self.model is None) == (self.program is None):
            got = "neither" if self.model is None else "both"
            raise disagreement("model", f"a compile job checks a model or a program; got {got}", got, "one of them")
        own = [name for name in _OF_A_MODEL if self._says(name)]
        if self.program is not None and own:
            message = f"{own[0]} describes a model; a program brings its own, in the fields of program"
            raise disagreement(own[0], message, self.model_dump(mode="json")[own[0]], "none beside program")
        if self.parallel.pp > 1 and self._says("micro_batches"):
            message = f"it is for models in one piece, and parallel.pp={self.parallel.pp}"
            raise disagreement("micro_batches", message, self.micro_batches, "pipeline.micro_batches instead")
        return self

    def _says(self, name: str) -> bool:
        """Return whether a field differs from its default; a spec that was written out holds all fields."""
        default = type(self).model_fields[name].default
        return getattr(self, name) not in (default, _FORMER_DEFAULTS.get(name, default))
