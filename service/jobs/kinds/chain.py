"""Chains: jobs that name each other, submitted by one spec."""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn

from pydantic import Field, StringConstraints, model_validator

from service.jobs.plugins import CommonSpec, JobKind, RunContext, disagreement
from service.jobs.spec.common import Recorded

MOST_CHAINED = 64
"""The most jobs of one chain."""
ChainedName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
_OWN = frozenset({"kind", "name", "labels", "notify", "jobs"})


class ChainSpec(CommonSpec):
    """Run ``jobs`` of any kind, each as soon as those that it names have succeeded; all are accepted, or none."""

    kind: Literal["chain"] = Field("chain", description="jobs that name each other")
    jobs: dict[ChainedName, dict[str, Recorded]] = Field(
        min_length=1,
        max_length=MOST_CHAINED,
        description="specs by name; wherever one takes a job's id, it may have the name of another",
    )

    @property
    def stands_for_others(self) -> bool:
        return True

    @model_validator(mode="after")
    def _says_what_is_its_own(self) -> ChainSpec:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in _OWN and value != field.get_default(call_default_factory=True):
                raise disagreement(name, "a chain holds no devices", str(value), "it in the specs of jobs")
        return self


def run(spec: ChainSpec, context: RunContext) -> NoReturn:
    """Raise ``RuntimeError``: a chain has no ranks."""
    raise RuntimeError(f"{context.job_id} is a chain: its jobs run in its place")


CHAIN = JobKind(ChainSpec, "service.jobs.kinds.chain:run")
