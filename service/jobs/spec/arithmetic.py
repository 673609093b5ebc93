"""Defines how jobs compute a model: its types, the recomputation in a backward pass, and what is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from service.jobs.spec.common import Dependency, JobId, ParallelSpec, Strict, disagreement

DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""The types of numbers that specs may name, with the names that torch and Hugging Face's files have for them."""

FLOAT8_MULTIPLE = 16
"""Products of float8 need every dimension of their factors to be a multiple of this."""

if TYPE_CHECKING:
    DtypeName = str
else:
    DtypeName = Literal[tuple(DTYPES)]

ActivationCheckpoint = Literal["none", "selective", "full"]


class PrecisionSpec(Strict):
    """Chooses the types in which a model is computed and its gradients are summed."""

    param: DtypeName = Field("fp32", description="the type of forwards and backwards; master weights stay in fp32")
    reduce: DtypeName = Field(
        "fp32", description="the type in which gradients are summed over ranks; a rank adds them up in fp32 before"
    )
    float8: bool = Field(False, description="linear layers in float8; needs a CUDA device of sm_89 or later")

    @property
    def casts(self) -> bool:
        """Return whether computation uses parameters or gradients in another type than float32."""
        return (self.param, self.reduce) != ("fp32", "fp32")


class CompileChoice(Strict):
    """Chooses what to compile; only modes that the named compile job's gate allows for this configuration are used."""

    train: bool = Field(False, description="compile the training step")
    inference: bool = Field(False, description="compile the evaluation")
    gate: JobId | None = Field(None, description="the id of the compile job whose gate allows it")

    def dependencies(self) -> tuple[Dependency, ...]:
        return () if self.gate is None else (Dependency("compile.gate", self.gate, "compile"),)

    @model_validator(mode="after")
    def _needs_gate(self) -> CompileChoice:
        if (self.train or self.inference) and self.gate is None:
            expected = "the id of a compile job whose report allows it"
            raise disagreement("gate", "compiling needs a gate", self.gate, expected)
        return self


def is_sharded(parallel: ParallelSpec, precision: PrecisionSpec) -> bool:
    """Return whether FSDP2 manages a model: to share it among ranks, or to cast parameters."""
    return parallel.dp > 1 or precision.casts
