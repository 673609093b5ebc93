"""The rules by which a sweep stops jobs early that do worse than others. A rule is a file, and a line here."""

from typing import Annotated

from pydantic import Field

from service.jobs.spec.common.stopping.halving import Halving
from service.jobs.spec.common.stopping.median import MedianRule
from service.jobs.spec.common.stopping.plan import Judgement, Standing, Stopped, judge
from service.jobs.spec.common.stopping.rule import MOST_FOLLOWED, Reported, StoppingRule

AnyRule = Annotated[
    Halving
    | MedianRule,
    Field(discriminator="rule"),
]  # fmt: skip

__all__ = [
    "MOST_FOLLOWED",
    "AnyRule",
    "Halving",
    "Judgement",
    "MedianRule",
    "Reported",
    "Standing",
    "Stopped",
    "StoppingRule",
    "judge",
]
