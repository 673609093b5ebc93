"""Common ground of all job specs: strict models, identifiers, the parallel degrees."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

JobId = Annotated[str, StringConstraints(pattern=r"^job_[0-9a-z]{20}$")]
FileId = Annotated[str, StringConstraints(pattern=r"^file_[0-9a-f]{64}$")]
LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]
LabelValue = Annotated[str, StringConstraints(max_length=120)]
DeviceChoice = Literal["auto", "cuda", "cpu"]

PARALLEL_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")


class Strict(BaseModel):
    """A frozen spec fragment that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ParallelSpec(Strict):
    """Degrees of parallelism; their product is the number of ranks (one device each)."""

    pp: int = Field(1, ge=1, le=1024, description="pipeline stages in space (ranks in a pipeline)")
    dp_replicate: int = Field(1, ge=1, le=4096, description="replicas of the sharded model (HSDP)")
    dp_shard: int = Field(1, ge=1, le=4096, description="FSDP2 shards of parameters, gradients and optimizer state")
    tp: int = Field(1, ge=1, le=1024, description="tensor-parallel ranks")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def arithmetic(self) -> str:
        """The product as a user would check it, e.g. ``pp=2 × dp_replicate=1 × dp_shard=1 × tp=2 = 4``."""
        factors = " × ".join(f"{name}={getattr(self, name)}" for name in PARALLEL_DIMENSIONS)
        return f"{factors} = {self.world_size}"


class CommonSpec(Strict):
    """Fields that every kind of job has."""

    name: str = Field("", max_length=200, description="free text shown in lists; the kind when empty")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    priority: int = Field(0, ge=-100, le=100, description="higher runs first; age decides between equals")
    retries: int = Field(0, ge=0, le=100, description="attempts after the first one")
    timeout_s: float | None = Field(None, gt=0, description="limit on the running time of one attempt, in seconds")
    after: list[JobId] = Field(default_factory=list, max_length=64, description="jobs that must succeed first")
    parallel: ParallelSpec = ParallelSpec()
    max_hosts: int = Field(1, ge=1, le=1024, description="how many hosts the ranks may be spread over")
    device: DeviceChoice = "auto"
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _no_duplicate_dependencies(self) -> CommonSpec:
        if len(set(self.after)) != len(self.after):
            raise ValueError("'after' names a job twice; name each job once")
        return self
