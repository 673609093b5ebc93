"""The spec of a compile-check job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from service.jobs.spec.arithmetic import ActivationCheckpoint, PrecisionSpec
from service.jobs.spec.base import CommonSpec, ParallelSpec, Strict
from service.jobs.spec.data import DataSpec
from service.jobs.spec.model import ModelRef

Mode = Literal["eager", "aot_eager", "inductor"]
Phase = Literal["train", "inference"]


class Tolerance(Strict):
    """A compiled run may be this far from eager, or this many times further from float64 than eager is."""

    absolute: float = Field(1e-4, gt=0)
    ratio: float = Field(2.0, ge=1)


class CompileSpec(CommonSpec):
    """Find the highest safe ``torch.compile`` rung for ``model``, per phase."""

    kind: Literal["compile"] = "compile"
    model: ModelRef
    data: DataSpec | None = Field(None, description="inputs of the real kind; random ones that fit when absent")
    modes: tuple[Mode, ...] = Field(("eager", "aot_eager", "inductor"), min_length=1)
    phases: tuple[Phase, ...] = Field(("train", "inference"), min_length=1)
    steps: int = Field(4, ge=2, le=1000, description="iterations per rung and phase")
    shapes: tuple[Annotated[int, Field(ge=1)], ...] = Field((16,), min_length=1, description="batch sizes, in turn")
    tolerance: Tolerance = Tolerance()
    precision: PrecisionSpec = PrecisionSpec()
    activation_checkpoint: ActivationCheckpoint = "none"

    @field_validator("parallel")
    @classmethod
    def _one_stage(cls, parallel: ParallelSpec) -> ParallelSpec:
        if parallel.pp > 1:
            raise ValueError(f"a model is checked in one piece: pp must be 1, got {parallel.pp}; tp and dp are free")
        return parallel

    @model_validator(mode="after")
    def _starts_at_eager(self) -> CompileSpec:
        ladder = ("eager", "aot_eager", "inductor")
        if self.modes != ladder[: len(self.modes)]:
            raise ValueError(f"modes climb the ladder from its foot: a beginning of {', '.join(ladder)}")
        return self
