"""How a model is computed, whichever kind of job computes it: its types, and what a backward pass computes again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from service.jobs.spec.base import Strict

ActivationCheckpoint = Literal["none", "selective", "full"]


class PrecisionSpec(Strict):
    param: Literal["fp32", "bf16"] = "fp32"
    reduce: Literal["fp32", "bf16"] = "fp32"
    float8: bool = Field(False, description="linear layers in float8; needs a CUDA device of sm_89 or later")
