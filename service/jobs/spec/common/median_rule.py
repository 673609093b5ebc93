"""The median rule: a job stops if its best is worse than what half of the others had on average."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Literal

from pydantic import Field

from service.jobs.spec.common.stopping_rule import Reported, StoppingRule


class MedianRule(StoppingRule):
    """Stops a job at a step from ``first`` on if its best value so far is worse than the median of the other jobs'
    means up to that step; those count that have got as far, and there must be ``others`` of them.
    """

    rule: Literal["median"] = Field("median", description="worse than the median of the other jobs' means so far")
    others: int = Field(3, ge=2, le=1000, description="the fewest other jobs that must have got as far")

    @property
    def least_jobs(self) -> int:
        return self.others + 1

    def reason(self, new: Reported, before: Sequence[Reported]) -> str | None:
        if new.step < self.first:
            return None
        own, means = [new.value], []
        by_job: dict[str, list[Reported]] = {}
        for each in before:
            by_job.setdefault(each.job, []).append(each)
        for job, values in by_job.items():
            so_far = [each.value for each in values if each.step <= new.step]
            if job == new.job:
                own += so_far
            elif so_far and max(each.step for each in values) >= new.step:
                means.append(fmean(so_far))
        best, limit = (min if self.mode == "min" else max)(own), median(means) if means else 0.0
        if len(means) < self.others or not self.is_better(limit, best):
            return None
        side = "above" if self.mode == "min" else "below"
        return f"its best {self.metric} {best:.6g} is {side} the median {limit:.6g} of {len(means)} other jobs' means"
