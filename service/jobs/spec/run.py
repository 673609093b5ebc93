"""Defines the spec of a job that runs a program's inference."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from service.jobs.spec.arithmetic import CompileChoice
from service.jobs.spec.common import CommonSpec, Dependency, disagreement
from service.jobs.spec.data import DataSpec
from service.jobs.spec.model import FromJob, jobs_of
from service.jobs.spec.program import InstalledProgramRef
from service.jobs.spec.train import CountersSpec


class RunSpec(CommonSpec):
    """Run the inference of an installed ``program`` over ``data``, or over its own batches for ``steps``."""

    kind: Literal["run"] = Field("run", description="a run of a program's inference")
    program: InstalledProgramRef = Field(description="the program, from an installed package")
    weights: FromJob | None = Field(
        None, description="the training of the program whose weights it has; those that it builds when absent"
    )
    data: DataSpec | None = Field(
        None, description="the source whose test split it runs over once; its own batches when absent"
    )
    batch: int = Field(64, ge=1, le=2**20, description="samples of data in a step, over all data-parallel ranks")
    steps: int | None = Field(None, ge=1, le=10**9, description="steps over the program's own batches")
    compile: CompileChoice = CompileChoice()
    counters: CountersSpec = CountersSpec()

    @property
    def gate_job(self) -> str | None:
        """Return the id of the compile job whose gate permits the requested mode."""
        return self.compile.gate

    def dependencies(self) -> tuple[Dependency, ...]:
        """Return the job of the weights, the gate's, and those of ``after``."""
        return (*jobs_of(self.weights, "weights"), *self.compile.dependencies(), *super().dependencies())

    @model_validator(mode="after")
    def _ends(self) -> RunSpec:
        if (self.data is None) == (self.steps is None):
            got = "neither" if self.data is None else "both"
            message = f"a run ends with its data or after its steps; got {got}"
            raise disagreement("steps", message, self.steps, "steps, or data")
        if self.compile.train:
            raise disagreement("compile.train", "a run trains nothing", True, "false, and compile.inference")
        if self.data is not None and self.batch % self.parallel.dp:
            message = f"{self.batch} samples do not divide by {self.parallel.dp} data-parallel ranks"
            raise disagreement("batch", message, self.batch, f"a multiple of {self.parallel.dp}")
        return self
