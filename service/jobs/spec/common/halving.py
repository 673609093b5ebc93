"""Successive halving without pauses: at each rung the best share of the jobs goes on, and the others stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field

from service.jobs.spec.common.stopping_rule import Reported, StoppingRule


class Halving(StoppingRule):
    """Stops a job at a rung unless it is among the best 1/``factor`` of those that have got there so far. Rungs are at
    ``first``, ``first`` · ``factor``, ``first`` · ``factor``² … steps; fewer than ``factor`` jobs at one all go on.

    Who goes on is judged again at each evaluation, by its value at its last rung, among all that have got there by
    then: else, of jobs that go in step, whichever happens to come first would never be stopped.
    """

    rule: Literal["halving"] = Field("halving", description="asynchronous successive halving, which pauses no job")
    factor: int = Field(
        3, ge=2, le=1000, description="one of so many jobs goes on from a rung, to one at so many times its step"
    )

    @property
    def least_jobs(self) -> int:
        return self.factor

    def reason(self, new: Reported, before: Sequence[Reported]) -> str | None:
        begun = max((each.step for each in before if each.job == new.job), default=0)
        known = (*before, new)
        for rung in self._rungs(begun, new.step):
            there = _first_at(rung, known)
            own = there[new.job]
            better, going = (
                sum(self.is_better(each.value, own.value) for each in there.values()),
                len(there) // self.factor,
            )
            if going and better >= going:
                most = "the best goes on" if going == 1 else f"the best {going} go on"
                value = f"{self.metric} {own.value:.6g} of step {own.step}"
                return f"{value} is number {better + 1} of {len(there)} so far, of which {most}"
        return None

    def _rungs(self, begun: int, upto: int) -> Iterator[int]:
        """Yield the last rung up to the step ``begun``, and all from there up to another."""
        rung = self.first
        while rung <= upto:
            if rung * self.factor > begun:
                yield rung
            rung *= self.factor


def _first_at(rung: int, values: Iterable[Reported]) -> dict[str, Reported]:
    """Return the first value of each job at a rung or above it."""
    found: dict[str, Reported] = {}
    for each in values:
        if each.step >= rung:
            found.setdefault(each.job, each)
    return found
