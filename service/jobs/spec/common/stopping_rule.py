"""Defines what every rule has: the metric that it follows, and its judgement of a value among those before it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from service.jobs.spec.common.strict import Strict

MOST_FOLLOWED = 20_000
"""The most values that the rule of one sweep follows, over all jobs."""


@dataclass(frozen=True)
class Reported:
    """The value of the metric that a job of the sweep reported after so many steps."""

    job: str
    step: int
    value: float


class StoppingRule(Strict):
    """Base of a rule, which adds ``rule: Literal["its name"]`` and its fields. It follows from its arguments alone."""

    rule: str
    metric: str = Field(min_length=1, max_length=100, description="metric of evaluations, such as eval_loss")
    mode: Literal["min", "max"] = Field(description="whether the least or the greatest value is best")
    first: int = Field(ge=1, description="the first step at which a job may be stopped")

    @property
    @abstractmethod
    def least_jobs(self) -> int:
        """Return the number of jobs with fewer of which it would never stop any."""

    @abstractmethod
    def reason(self, new: Reported, before: Sequence[Reported]) -> str | None:
        """Return why the job that reported ``new`` stops there; ``None`` if it goes on.

        ``before`` has what competing jobs, and this one, reported before, in the order of arrival.
        """

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one, and not equal."""
        return value < other if self.mode == "min" else value > other
