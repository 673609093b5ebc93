"""Decides, from what all jobs of a sweep have reported, which of them stop early. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.jobs.spec.common.states import JobState
from service.jobs.spec.common.stopping_rule import Reported, StoppingRule

_NO_COMPETITORS = ("failed", "cancelling", "cancelled")


@dataclass(frozen=True)
class Standing:
    """What is known of a sweep: what its jobs reported, in the order of arrival, how many of these values were judged
    before, the jobs' states, and the steps of those that were told to stop.
    """

    reported: Sequence[Reported]
    judged: int
    states: Mapping[str, JobState]
    told: Mapping[str, int]


@dataclass(frozen=True)
class StoppedJob:
    """A job that stops early, the step whose value was judged, and why."""

    job: str
    step: int
    reason: str


@dataclass(frozen=True)
class Judgement:
    """The number of values that are judged now, and the jobs that stop by them."""

    judged: int
    stopped: tuple[StoppedJob, ...]


def judge(rule: StoppingRule, standing: Standing, most: int) -> Judgement:
    """Judge the next values, ``most`` at most: each among those before it, so that the result does not depend on when
    it is asked for. Jobs that failed or were cancelled do not compete, nor does what a job reported after the value by
    which it was stopped.
    """
    told, stopped = dict(standing.told), list[StoppedJob]()
    upto = min(standing.judged + most, len(standing.reported))
    for at in range(standing.judged, upto):
        new = standing.reported[at]
        if new.job in told or standing.states.get(new.job, "failed") in ("succeeded", *_NO_COMPETITORS):
            continue
        before = [each for each in standing.reported[:at] if _competes(each, standing.states, told)]
        if (why := rule.reason(new, before)) is not None:
            told[new.job] = new.step
            stopped.append(StoppedJob(new.job, new.step, f"stopped early by the sweep at step {new.step}: {why}"))
    return Judgement(upto, tuple(stopped))


def _competes(value: Reported, states: Mapping[str, JobState], told: Mapping[str, int]) -> bool:
    is_out = states.get(value.job, "failed") in _NO_COMPETITORS
    return not is_out and value.step <= told.get(value.job, math.inf)
