"""Common ground of all job specs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from service.jobs.fragments import (
    PARALLEL_DIMENSIONS,
    TOO_MANY_ERRORS,
    FileId,
    JobId,
    ParallelSpec,
    Strict,
    disagreement,
)

__all__ = [
    "PARALLEL_DIMENSIONS",
    "CommonSpec",
    "DeviceChoice",
    "FileId",
    "JobId",
    "ParallelSpec",
    "Strict",
    "disagreement",
]

_MOST_ERRORS = 2000
LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]
LabelValue = Annotated[str, StringConstraints(max_length=120)]
DeviceChoice = Literal["auto", "cuda", "cpu"]


class CommonSpec(Strict):
    """Fields that every kind of job has."""

    name: str = Field("", max_length=200, description="free text shown in lists; the kind when empty")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    priority: int = Field(0, ge=-100, le=100, description="higher runs first; age decides between equals")
    retries: int = Field(0, ge=0, le=100, description="attempts after the first one")
    timeout_s: float | None = Field(None, gt=0, description="limit on the running time of one attempt, in seconds")
    stall_s: float | None = Field(
        3600.0,
        gt=0,
        description="an attempt fails when its ranks report and print nothing for so many seconds; null for no limit",
    )
    after: list[JobId] = Field(default_factory=list, max_length=64, description="jobs that must succeed first")
    parallel: ParallelSpec = ParallelSpec()
    max_hosts: int = Field(1, ge=1, le=1024, description="how many hosts the ranks may be spread over")
    device: DeviceChoice = "auto"
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="wrap")
    @classmethod
    def _with_few_errors(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """A list of errors takes microseconds for each, and a megabyte can hold hundreds of thousands."""
        try:
            return validate(value)
        except ValidationError as error:
            if (count := error.error_count()) <= _MOST_ERRORS:
                raise
            raise PydanticCustomError(TOO_MANY_ERRORS, "{count} values are wrong", {"count": count}) from None

    @model_validator(mode="after")
    def _no_duplicate_dependencies(self) -> CommonSpec:
        if len(set(self.after)) != len(self.after):
            raise disagreement("after", "it names a job twice", self.after, "each job once")
        return self
