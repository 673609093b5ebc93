"""Declarative job specs: one discriminated union over ``kind``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import TrainSpec
from service.jobs.spec.verify import VerifySpec

JobSpec = Annotated[TrainSpec | VerifySpec | CompileSpec, Field(discriminator="kind")]
KINDS: dict[str, type[TrainSpec] | type[VerifySpec] | type[CompileSpec]] = {
    "train": TrainSpec,
    "verify": VerifySpec,
    "compile": CompileSpec,
}
spec_adapter: TypeAdapter[TrainSpec | VerifySpec | CompileSpec] = TypeAdapter(JobSpec)

__all__ = ["KINDS", "CompileSpec", "JobSpec", "TrainSpec", "VerifySpec", "spec_adapter"]
