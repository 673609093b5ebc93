"""Who stops early, by each rule: as an independent reckoning says, whenever it is asked, and whoever has failed."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.jobs.spec.common import Halving, MedianRule, Reported, Standing, StoppingRule, SweepSpec, judge

JOBS = [f"job_{number}" for number in range(6)]
RULES: list[StoppingRule] = [
    Halving(metric="eval_loss", mode="min", first=2, factor=2),
    Halving(metric="eval_accuracy", mode="max", first=1, factor=3),
    MedianRule(metric="eval_loss", mode="min", first=2, others=2),
    MedianRule(metric="eval_accuracy", mode="max", first=3, others=3),
]
rules = st.sampled_from(RULES)


@st.composite
def histories(draw: st.DrawFn) -> list[Reported]:
    """Jobs that report at every second step, in any order between them."""
    at, found = dict.fromkeys(JOBS, 0), []
    for job in draw(st.lists(st.sampled_from(JOBS), max_size=40)):
        at[job] += 2
        found.append(Reported(job, at[job], draw(st.integers(0, 9)) / 4))
    return found


def stopped(rule: StoppingRule, values: list[Reported], **known: Any) -> dict[str, int]:
    """The jobs that stop and the steps at which they do, judged in pieces of any size."""
    standing: dict[str, Any] = {"judged": 0, "states": dict.fromkeys(JOBS, "running"), "told": {}}
    standing |= known
    most = standing.pop("most", 1000)
    while standing["judged"] < len(values):
        found = judge(rule, Standing(values, **standing), most)
        standing["judged"] = found.judged
        standing["told"] = {**standing["told"], **{each.job: each.step for each in found.stopped}}
    return dict(standing["told"])


def expected(rule: StoppingRule, values: list[Reported]) -> dict[str, int]:
    """The same, told from each rule's definition, on values whose sign makes the least the best."""
    sign = 1 if rule.mode == "min" else -1
    told: dict[str, int] = {}
    series: dict[str, dict[int, float]] = {}
    for new in values:
        if new.job in told:
            continue
        series.setdefault(new.job, {})[new.step] = sign * new.value
        if isinstance(rule, Halving):
            rungs, since = [rule.first * rule.factor**power for power in range(8)], new.step - 2
            last = max((rung for rung in rungs if rung <= since), default=0)
            stops = any(_loses(rung, new, series, rule) for rung in rungs if last <= rung <= new.step)
        else:
            assert isinstance(rule, MedianRule)
            stops = new.step >= rule.first and _is_behind(new, series, rule.others)
        if stops:
            told[new.job] = new.step
    return told


def _loses(rung: int, new: Reported, series: dict[str, dict[int, float]], rule: Halving) -> bool:
    there = {job: own[min(at for at in own if at >= rung)] for job, own in series.items() if max(own) >= rung}
    place = sorted(there.values()).index(there[new.job]) + 1
    return len(there) >= rule.factor and place > len(there) // rule.factor


def _is_behind(new: Reported, series: dict[str, dict[int, float]], least: int) -> bool:
    means = [
        fmean(value for at, value in own.items() if at <= new.step)
        for job, own in series.items()
        if job != new.job and max(own) >= new.step
    ]
    return len(means) >= least and min(series[new.job].values()) > median(means)


@given(rules, histories())
def test_those_stop_whom_the_definition_names(rule: StoppingRule, values: list[Reported]) -> None:
    assert stopped(rule, values) == expected(rule, values)


def test_of_jobs_that_go_in_step_the_worse_one_is_stopped_even_if_it_always_comes_first() -> None:
    values = [Reported(JOBS[each], step, each * -1.0) for step in (2, 4, 6) for each in (0, 1)]
    assert stopped(RULES[0], values) == {JOBS[0]: 4}


@given(rules, histories(), st.integers(1, 7))
def test_it_does_not_matter_when_and_in_which_pieces_it_is_asked(
    rule: StoppingRule, values: list[Reported], most: int
) -> None:
    assert stopped(rule, values, most=most) == stopped(rule, values)


@given(rules, histories(), st.sets(st.sampled_from(JOBS)), st.sampled_from(["failed", "cancelled", "cancelling"]))
def test_a_job_that_failed_or_was_cancelled_does_not_compete(
    rule: StoppingRule, values: list[Reported], out: set[str], state: str
) -> None:
    states = {job: state if job in out else "running" for job in JOBS}
    others = [value for value in values if value.job not in out]
    assert stopped(rule, values, states=states) == stopped(rule, others)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (RULES[0], "eval_loss 3 of step 2 is number 3 of 4 so far, of which the best 2 go on"),
        (RULES[2], "its best eval_loss 3 is above the median 2 of 3 other jobs' means"),
    ],
)
def test_the_reason_has_the_numbers(rule: StoppingRule, said: str) -> None:
    values = [Reported(job, 2, value) for job, value in zip(JOBS, (1.0, 2.0, 4.0, 3.0), strict=False)]
    states: Any = dict.fromkeys(JOBS, "running")
    (found,) = judge(rule, Standing(values, 3, states, {}), 10).stopped
    assert (found.job, found.step, found.reason) == (JOBS[3], 2, f"stopped early by the sweep at step 2: {said}")


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ({"rule": "halving", "factor": 1}, "greater than or equal to 2"),
        ({"rule": "halving", "factor": 4}, "the sweep makes 3 jobs, and its rule halving stops none of fewer than 4"),
        ({"rule": "median", "others": 1}, "greater than or equal to 2"),
        ({"rule": "median", "others": 3}, "the sweep makes 3 jobs, and its rule median stops none of fewer than 4"),
        ({"rule": "hyperband"}, "'halving', 'median'"),
    ],
)
def test_a_rule_that_could_stop_nobody_is_refused(stop: dict[str, Any], said: str) -> None:
    rule = {"metric": "eval_loss", "mode": "min", "first": 10, **stop}
    forms: list[dict[str, Any]] = [
        {"grid": {"seed": [1, 2, 3]}},
        {"zip": {"seed": [1, 2, 3]}},
        {"list": [{"seed": 1}, {"seed": 2}, {"seed": 3}]},
        {"random": {"fields": {"seed": [1, 2]}, "jobs": 3}},
    ]
    for form in forms:
        with pytest.raises(ValidationError, match=said):
            SweepSpec.model_validate({**form, "stop": rule})
