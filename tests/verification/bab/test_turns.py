"""Searches over inputs and over activations take turns, and lose nothing by that."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from math import inf

import pytest
import torch
from search_problems import model_from
from torch import Tensor, nn

from service.bounds.methods import CROWN
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab import turns
from service.verification.bab.decision import ProgressListener, SearchProgress, SearchResult, Technique
from service.verification.bab.driver import decide
from service.verification.bab.settings import SearchSettings
from service.verification.bab.specification import Specification
from service.verification.bab.time_plan import TimePlan
from service.verification.bab.turns import Course, Turns
from service.verification.verdict import Verdict

PLAN = TimePlan()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(turns.time, "monotonic", lambda: self.now)


class Planned:
    """A search that uses all of its time, and returns what is planned for each turn."""

    def __init__(self, clock: Clock, *found: SearchResult) -> None:
        self.clock, self.found, self.seconds = clock, list(found), list[float]()

    def run(self, deadline: float) -> SearchResult:
        self.seconds.append(deadline - self.clock.now)
        self.clock.now = deadline
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


def still(bound: float, domains: int = 1) -> SearchResult:
    return SearchResult(Verdict.UNKNOWN, None, domains, bound, is_over=False)


def taking(clock: Clock, heard: list[SearchProgress], *searches: Planned, limit: float = 100.0) -> Turns:
    def begin(search: Planned) -> Course:
        technique = Technique.INPUTS if search is searches[0] else Technique.ACTIVATIONS

        def begun(deadline: float, listener: ProgressListener) -> Planned:
            assert deadline == limit, "what is planned is planned for all of the time"
            listener(SearchProgress(5, 1, -9.0))
            return search

        return Course(technique, begun)

    courses = [begin(each) for each in searches]
    return Turns(courses, PLAN, limit, lambda run: run(), lambda at: clock.now >= at, heard.append)


def test_the_better_bound_and_the_one_that_gets_there_first_have_longer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the better one stands."""
    clock = Clock(monkeypatch)
    rising = Planned(clock, still(-2.0, 10), still(-1.5, 10), still(-1.0, 10))
    better = Planned(clock, still(-1.0, 3), still(-1.0, 4), SearchResult(Verdict.VERIFIED, None, 6, 0.1))
    heard: list[SearchProgress] = []
    result, technique = taking(clock, heard, rising, better).run(PLAN.least_turn)
    assert (result.verdict, technique) == (Verdict.VERIFIED, Technique.ACTIVATIONS)
    assert (result.domains, result.bound) == (16, 0.1)
    assert len(rising.seconds) == len(better.seconds) == 3
    assert rising.seconds[1] == better.seconds[0] == PLAN.least_turn, "the first bound is no pace"
    assert better.seconds[1] > 2 * rising.seconds[1]
    assert rising.seconds[2] > better.seconds[1]
    assert heard[1].domains == 15
    assert heard[1].bound == -2.0, "what another search proved holds"


def test_a_search_whose_bound_stands_keeps_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where boxes are halved, the bound hardly rises until most of them are small."""
    clock = Clock(monkeypatch)
    stands = Planned(clock, still(-9.0))
    taking(clock, [], stands, Planned(clock, *(still(-1.0 + 0.01 * turn) for turn in range(90)))).run(PLAN.least_turn)
    assert sum(stands.seconds) > 0.15 * clock.now


def test_a_search_that_can_do_no_more_leaves_all_of_the_time_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stuck = Planned(clock, SearchResult(Verdict.UNKNOWN, None, 7, -1.0))
    other = Planned(clock, still(-2.0, 1))
    result, technique = taking(clock, [], stuck, other).run(1.0)
    assert (result.verdict, technique) == (Verdict.UNKNOWN, Technique.ACTIVATIONS)
    assert (result.domains, result.bound) == (8, -1.0)
    assert len(stuck.seconds) == 1
    assert clock.now == 100.0


def test_one_search_has_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    alone = Planned(clock, still(-inf))
    taking(clock, [], alone).run(1.0)
    assert alone.seconds == [100.0]


class Needle(nn.Module):
    """``1 − 2 relu(1 − 25 Σ |mean − t|)`` of the means of four inputs each: ±1, and −1 only where no gradient leads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 1)
        targets = torch.tensor([0.3, -0.6, 0.1, 0.8])
        with torch.no_grad():
            self.first.weight.copy_(torch.cat([torch.eye(4), -torch.eye(4)]))
            self.first.bias.copy_(torch.cat([-targets, targets]))
            self.second.weight.fill_(-25.0)
            self.second.bias.fill_(1.0)
            self.last.weight.fill_(-2.0)
            self.last.bias.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.second(torch.relu(self.first(x.unflatten(1, (4, 4)).mean(dim=2))))))
        return found


def test_a_few_activations_behind_several_inputs_are_split_although_inputs_may_be() -> None:
    """Halving sixteen inputs never gets there: it takes 2 ** 16 boxes to halve the means once."""
    box = Disjunct((-1.0,) * 16, (1.0,) * 16, (Halfspace(((0, 1.0),), 0.0),))
    under = model_from(Needle().requires_grad_(False).double(), 16)
    under = replace(under, settings=SearchSettings(time=TimePlan(least_turn=0.2, quick_seconds=600)))
    found = decide(under, Query(16, 1, (box,)), CROWN, 600.0, restarts=0)
    assert (found.verdict, found.technique) == (Verdict.FALSIFIED, Technique.ACTIVATIONS)


def test_what_intervals_prove_is_neither_attacked_nor_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many boxes and disjuncts; those that stay open share the time of the attack."""
    attacked: list[tuple[int, float]] = []
    driver = importlib.import_module("service.verification.bab.driver")

    def attack(_: object, specification: Specification, deadline: float, *__: object) -> None:
        attacked.append((specification.disjunct_count, deadline))

    monkeypatch.setattr(driver, "attack", attack)
    under = model_from(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()), 1)
    with torch.no_grad():
        under.module.get_parameter("0.weight").fill_(1.0)

    def case(low: float, least: float) -> Disjunct:
        return Disjunct((low,), (low + 1.0,), (Halfspace(((0, -1.0),), -least),))

    far = [case(float(low), low + 2.0) for low in range(20)]
    proved = decide(under, Query(1, 1, tuple(far)), CROWN, 1000.0)
    assert (proved.verdict, proved.technique, proved.domains) == (Verdict.VERIFIED, Technique.BOUNDS, 20)
    assert proved.bound == pytest.approx(1.0, abs=1e-3)
    assert not attacked
    started = time.monotonic()
    found = decide(under, Query(1, 1, (*far, case(0.0, 1.0), case(5.0, 6.0))), CROWN, 1000.0)
    assert found.verdict is Verdict.FALSIFIED
    assert [count for count, _ in attacked] == [1, 1]
    assert attacked[0][1] < started + 150 < attacked[1][1] < started + 250
