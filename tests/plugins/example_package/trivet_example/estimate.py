"""A kind of job, without torch: what a spec says, what is checked at submission, and where the rest is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trivet.plugins import CheckContext, CommonSpec, JobKind, Problem


class EstimateSpec(CommonSpec):
    """Estimate π from the share of random points of a square that lie in its inscribed circle."""

    kind: Literal["estimate"] = "estimate"
    points: int = Field(ge=1, le=10**9, description="of all ranks together")
    rounds: int = Field(8, ge=1, le=1000)


def check(spec: EstimateSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why the points cannot be dealt out evenly."""
    ranks = spec.parallel.world_size
    if spec.points % (ranks * spec.rounds):
        message = f"{spec.points} points do not divide by {ranks} ranks × {spec.rounds} rounds"
        yield Problem("points", message, spec.points, f"a multiple of {ranks * spec.rounds}")


KIND = JobKind(
    EstimateSpec,
    "trivet_example.sampling:run",
    check,
    page="trivet_example:estimate.js",
    report="estimate.json",
)
