"""Defines the spec of a training job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from service.jobs.plugins import Better
from service.jobs.spec.arithmetic import ActivationCheckpoint, CompileChoice, DtypeName, PrecisionSpec
from service.jobs.spec.common import CommonSpec, Dependency, ExportTargets, JobId, Strict, disagreement
from service.jobs.spec.data import DataSpec
from service.jobs.spec.model import ModelRef, Step, jobs_of
from service.jobs.spec.objective import CrossEntropy, ObjectiveSpec
from service.jobs.spec.optimizer import AdamWConfig, OptimizerSpec
from service.jobs.spec.program import InstalledProgramRef
from service.jobs.spec.rate import CosineDecay, ScheduleSpec, StopSpec
from service.schedules import GENERATORS

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(GENERATORS)]

_WITH_TWO_STAGES = " and ".join(name for name, schedule in GENERATORS.items() if schedule.stages_per_rank == 2)


class BatchSpec(Strict):
    """Samples per optimizer step (``global``) and per forward of one data-parallel rank (``micro``)."""

    global_: int = Field(64, ge=1, alias="global", description="samples of one optimizer step, over all ranks")
    micro: int | None = Field(
        None, ge=1, description="samples of one forward; when absent, a rank's whole share, or a pipeline's part of it"
    )


class ShardingSpec(Strict):
    """Chooses what FSDP2 keeps between the micro-batches of a step: memory against traffic."""

    reshard: Literal["auto", "always", "never"] = Field(
        "auto",
        description="when to free gathered parameters: after each use, or never; auto: after each use if a step has "
        "only one micro-batch",
    )
    reduce: Literal["last", "every"] = Field(
        "last",
        description="when to reduce gradients: after the last micro-batch, which keeps unsharded ones till then, or "
        "after every one",
    )

    def resolved(self, micro_batches: int) -> ShardingSpec:
        """Return the choice for a step of so many micro-batches: ``auto`` is decided, and a single micro-batch is the
        last.
        """
        freed = self.reshard == "always" or (self.reshard == "auto" and micro_batches == 1)
        return ShardingSpec(reshard="always" if freed else "never", reduce=self.reduce if micro_batches > 1 else "last")


class PipelineSpec(Strict):
    """Chooses how micro-batches move through the ``parallel.pp`` ranks of a pipeline; without effect if pp is
    1.
    """

    schedule: ScheduleName = Field(
        "1f1b", description="the order of forwards and backwards on each rank; `trivet schedule` draws it"
    )
    micro_batches: int | None = Field(None, ge=1, description="2·pp when absent")
    virtual_stages: int | None = Field(
        None, ge=1, le=64, description=f"stages on each rank; when absent 2 for {_WITH_TWO_STAGES}, else 1"
    )

    @property
    def stages_per_rank(self) -> int:
        """Return ``virtual_stages``, or the schedule's default if it is absent."""
        return self.virtual_stages or GENERATORS[self.schedule].stages_per_rank

    @model_validator(mode="after")
    def _stages_of_the_schedule(self) -> PipelineSpec:
        schedule = GENERATORS[self.schedule]
        if (refusal := schedule.refusal(self.stages_per_rank)) is not None:
            free = ", ".join(f"schedule={name}" for name, other in GENERATORS.items() if other.takes_any_stages)
            expected = f"{schedule.stages_per_rank} or null; {free} takes any number"
            raise disagreement("virtual_stages", f"schedule={refusal}", self.stages_per_rank, expected)
        return self


class CheckpointSpec(Strict):
    """Chooses when the state of a training is saved, and how many such states are kept."""

    every: int | None = Field(None, ge=1, description="steps between two; only at the end when absent")
    keep: int = Field(2, ge=1, description="number of checkpoints that stay, the newest")
    async_: bool = Field(True, alias="async", description="whether to write while training goes on")


class EvaluateSpec(Strict):
    """Chooses when the model is evaluated on the test split, and on how much of it."""

    every: int | None = Field(None, ge=1, description="steps between two; only at the end when absent")
    samples: int | None = Field(
        None, ge=1, description="number of samples, the first of the test split; all when absent"
    )


class CountersSpec(Strict):
    """Chooses the steps of which the metrics tell how they used the model: calls by module, phase and shape, calls
    within a backward, forwards for each micro-batch, and results that outlive their step.
    """

    every: int | None = Field(
        100,
        ge=1,
        le=10**9,
        description="steps from one such step to the next: 100 costs about 0.2 % of the time; none when null",
    )


class ExportSpec(ExportTargets):
    """Chooses what a finished job publishes beside ``model.safetensors``, and which services are told of it."""

    huggingface: DtypeName | None = Field(
        None, description="a folder that Hugging Face's libraries read, with weights of this type; transformers only"
    )
    onnx: bool = Field(
        False,
        exclude_if=lambda onnx: not onnx,  # a worker of an older version does not know the field
        description="a file `model.onnx`, which onnxruntime has compared with the module; classifiers and transformers",
    )


class ResumeSpec(Strict):
    """Continues another training job from a checkpoint: weights, optimizer, step, and the order of its data.

    ``steps`` counts from that job's start. Layout, number of steps, learning rate and the numbers of the schedule may
    differ; optimizer and schedule stay, with what decides their state.
    """

    job: JobId = Field(description="the id of a training job, however it ended")
    step: Step = Field("latest", description="the step of one of its checkpoints, or latest")


_OF_A_MODEL = (
    *("model", "data", "objective", "optimizer", "schedule", "batch", "precision", "sharding"),
    *("activation_checkpoint", "pipeline"),
)


class TrainSpec(CommonSpec):
    """Train a model, or an installed program, which brings its own data and optimizer, over the ranks of a mesh."""

    model_config = ConfigDict(json_schema_extra={"x-needed": ["model", "data"]})  # for forms: without a program

    kind: Literal["train"] = Field("train", description="a training job")
    program: InstalledProgramRef | None = Field(
        None,
        exclude_if=lambda program: program is None,  # a worker of an older version does not know the field
        description="in place of model and data: a program of several modules and their steps, from an installed "
        "package",
    )
    model: ModelRef | None = Field(
        None, validate_default=True, description="the model: a family with its sizes, or weights to start from"
    )
    data: DataSpec | None = Field(None, validate_default=True, description="the data to learn from")
    objective: ObjectiveSpec = CrossEntropy()
    optimizer: OptimizerSpec = Field(AdamWConfig(), description="the optimizer, and which parameters it updates how")
    schedule: ScheduleSpec = Field(
        CosineDecay(), description="the learning rate over the steps, as a share of its peak"
    )
    steps: int = Field(ge=1, le=10**9, description="optimizer steps")
    stop: StopSpec | None = Field(
        None,
        exclude_if=lambda stop: stop is None,  # a worker of an older version does not know the field
        description="when training ends before its last step",
    )
    resume: ResumeSpec | None = Field(None, description="the checkpoint of another job from which to continue")
    batch: BatchSpec = BatchSpec.model_validate({})
    precision: PrecisionSpec = PrecisionSpec()
    sharding: ShardingSpec = ShardingSpec()
    activation_checkpoint: ActivationCheckpoint = Field(
        "none",
        description="activations that a backward pass computes again in place of keeping them: less memory, more time",
    )
    pipeline: PipelineSpec = PipelineSpec()
    compile: CompileChoice = CompileChoice()
    checkpoint: CheckpointSpec = CheckpointSpec.model_validate({})
    evaluate: EvaluateSpec = EvaluateSpec()
    counters: CountersSpec = CountersSpec()
    export: ExportSpec = Field(
        ExportSpec(),
        description="forms of the finished model, and services that get metrics while the job runs, and its results "
        "when it ends",
    )

    @property
    def stages(self) -> int:
        """Return the number of pieces into which the model is cut; 1 without a pipeline."""
        return 1 if self.parallel.pp == 1 else self.parallel.pp * self.pipeline.stages_per_rank

    @property
    def resolved_sharding(self) -> ShardingSpec:
        """Return ``sharding`` as this job's steps run it."""
        return self.sharding.resolved(self.micro_batches)

    @property
    def micro_batches(self) -> int:
        """Return the number of forwards per optimizer step on each data-parallel rank."""
        share = self.batch.global_ // self.parallel.dp
        if self.batch.micro is not None:
            return max(share // self.batch.micro, 1)
        if self.parallel.pp == 1:
            return 1
        return self.pipeline.micro_batches or 2 * self.parallel.pp

    @property
    def forward_samples(self) -> int:
        """Samples of one forward, on each data-parallel rank."""
        return self.batch.global_ // self.parallel.dp // self.micro_batches

    @property
    def follows(self) -> Mapping[str, Better]:
        """Return the metrics of evaluations on which the course of the training depends."""
        return {**self.schedule.follows, **(self.stop.follows if self.stop else {})}

    @property
    def gate_job(self) -> str | None:
        """Return the id of the compile job whose gate permits the requested modes."""
        return self.compile.gate

    def dependencies(self) -> tuple[Dependency, ...]:
        """Return the model's job, the resumed job, the gate's, and those of ``after``."""
        resumed = () if self.resume is None else (Dependency("resume.job", self.resume.job, "train", self.resume.step),)
        return (*jobs_of(self.model), *resumed, *self.compile.dependencies(), *super().dependencies())

    @field_validator("model", "data")
    @classmethod
    def _needed_without_a_program(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("program", "one that is wrong") is None:
            raise PydanticKnownError("missing")
        return value

    @model_validator(mode="after")
    def _one_subject(self) -> TrainSpec:
        if self.program is None:
            return self
        fields = type(self).model_fields
        for name in _OF_A_MODEL:
            if getattr(self, name) != fields[name].default:
                message = "it describes a model; a program brings its own, in the fields of program"
                raise disagreement(name, message, self.model_dump(mode="json")[name], "none beside program")
        of_a_model = {
            "evaluate.samples": self.evaluate.samples,
            "export.huggingface": self.export.huggingface,
            "export.onnx": self.export.onnx or None,
        }
        for name, got in of_a_model.items():
            if got is not None:
                raise disagreement(name, "it is for models, and a program is trained", got, "null beside program")
        return self
