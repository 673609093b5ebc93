"""When a search tightens what all its domains share: spaced by the time it took, and not just before it ends."""

from __future__ import annotations

from math import inf

import pytest

from service.verification.bab.activations.refinement_times import MarginPace, RefinementTimes
from service.verification.bab.time_plan import TimePlan

PLAN = TimePlan(quick_seconds=1.0, quick_share=0.05, spacing=4.0, splitting=0.5)


def refined(ranks: int, seconds: float, fixed: float) -> list[float]:
    """Return when a search that open domains never leave refines, which takes as long as it took, and ``fixed``."""
    times, now, found = RefinementTimes(PLAN.divided(ranks), 100.0, 1100.0), 100.0, list[float]()
    while now < 100 + seconds:
        if now > times.due:
            found.append(now - 100)
            begun, now = now, now + (now - 100) + fixed
            times.end(begun, now)
        now += 1 / 64
    return found


@pytest.mark.parametrize("fixed", [0.0, 0.5])
def test_two_ranks_refine_in_half_of_the_seconds(fixed: float) -> None:
    """What each refinement takes on any number of ranks must not put off all that follows."""
    one, two = refined(1, 80.0, fixed), refined(2, 40.0, fixed)
    assert one == pytest.approx([1, 4, 16, 64], rel=0.05)
    assert two == pytest.approx([each / 2 for each in one], rel=0.05)


def test_splits_have_their_share_of_what_refinement_took() -> None:
    times = RefinementTimes(PLAN, 0.0, 1000.0)
    times.end(begun=1.0, now=21.0)
    assert times.due == 31.0


def test_a_search_that_refined_much_later_than_planned_plans_from_then() -> None:
    times = RefinementTimes(PLAN, 0.0, 1000.0)
    times.end(begun=30.0, now=60.0)
    assert times.due == 120.0


def noted(*seen: tuple[int, float]) -> RefinementTimes:
    """Return the times of a search that had so many open domains after so many seconds."""
    times = RefinementTimes(PLAN, 0.0, 1000.0)
    for open_, seconds in seen:
        times.note(open_, seconds)
    return times


def test_a_search_is_about_to_end_while_its_domains_go_as_fast_as_they_went() -> None:
    """At 1.1 s 50 of 100 domains went in half a second: the rest is looked at again when it should have gone."""
    times = noted((100, 0.6), (50, 1.1))
    assert times.is_about_to_end(50, 1.1)
    assert times.is_about_to_end(49, 1.5)
    assert not times.is_about_to_end(49, 1.7), "one domain in 0.6 s: the forecast did not come true"


@pytest.mark.parametrize("seen", [[(100, 0.6), (90, 1.1)], [(50, 0.6), (100, 1.1)]], ids=["slowly fewer", "more"])
def test_a_search_is_not_about_to_end(seen: list[tuple[int, float]]) -> None:
    assert not noted(*seen).is_about_to_end(*seen[-1])


def test_what_was_open_before_refinement_says_nothing_of_the_end() -> None:
    times = noted((1000, 0.6))
    times.end(begun=1.0, now=2.0)
    times.note(1, 2.0)
    assert not times.is_about_to_end(1, 2.0)


def test_the_pace_of_a_margin_says_when_it_is_proved() -> None:
    pace = MarginPace(-0.3, before=-0.4, seconds=2.0)
    assert pace.seconds_to_proof == pytest.approx(6.0)
    assert pace.has_gained(0.2)
    assert not pace.has_gained(0.3)


@pytest.mark.parametrize("pace", [MarginPace(-0.3), MarginPace(-0.3, -0.3, 2.0), MarginPace(-0.3, -0.2, 2.0)])
def test_no_proof_is_in_sight_without_a_gain(pace: MarginPace) -> None:
    assert pace.seconds_to_proof == inf
