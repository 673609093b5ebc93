"""What a timeline tells of a pipeline's run, on a clock that the test sets."""

from __future__ import annotations

import time

import pytest
import torch

from service.schedules import forward_only, generator
from service.schedules.schedule import COMPUTATIONS, Schedule
from service.training.step_totals import RankShare, StepReduction
from service.training.timeline import NO_LOAD, HostClock, Load, Timeline, bubble_fraction


class SetClock:
    """Ticks once for each mark; the device has passed those below ``passed``."""

    def __init__(self) -> None:
        self.ticks, self.passed = 0, 10**9

    def mark(self) -> int:
        self.ticks += 1
        return self.ticks

    def has_passed(self, mark: int) -> bool:
        return mark < self.passed

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)

    def epoch(self, mark: int) -> float:
        return 1000.0 + mark


def run(timeline: Timeline[int], schedule: Schedule) -> None:
    with timeline.run(schedule):
        for instruction in schedule.ranks[0]:
            if instruction.op in COMPUTATIONS:
                with timeline.computing(instruction):
                    pass


def test_load_is_of_the_newest_run_that_is_over() -> None:
    clock = SetClock()
    timeline = Timeline(clock)
    assert timeline.load() == NO_LOAD
    run(timeline, generator("gpipe")(2, 1, 3))
    # Marks at the start and end of the run and of six computations: six of the thirteen ticks between were busy.
    assert timeline.load() == Load(6.0, 13.0)
    run(timeline, generator("gpipe")(2, 1, 5))
    assert timeline.load() == Load(10.0, 21.0)
    clock.passed = 20
    assert timeline.load() == Load(6.0, 13.0)
    clock.passed = 0
    assert timeline.load() == NO_LOAD


def test_evaluations_leave_no_trace() -> None:
    clock = SetClock()
    timeline = Timeline(clock)
    run(timeline, forward_only((0, 1), 3))
    assert clock.ticks == 0
    assert list(timeline.spans(1)) == []


def test_spans_name_what_was_computed() -> None:
    timeline = Timeline(SetClock())
    schedule = generator("zbv")(2, 2, 2)
    run(timeline, schedule)
    spans = list(timeline.spans(7))
    computed = [each for each in schedule.ranks[0] if each.op in COMPUTATIONS]
    assert [name for name, *_ in spans] == [str(each.op) for each in computed]
    assert spans[0] == ("forward", 1002.0, 1003.0, {"step": 7, "stage": 0, "micro_batch": 0, "op": "forward"})
    assert {detail["stage"] for *_, detail in spans} == {0, 3}


def test_the_host_clock_tells_the_time_of_day() -> None:
    clock = HostClock()
    first = clock.mark()
    assert clock.has_passed(first)
    assert clock.seconds(first, clock.mark()) >= 0
    assert clock.epoch(first) == pytest.approx(time.time(), abs=60)


def test_bubble_is_what_is_not_busy_of_the_slowest_ranks_window() -> None:
    assert bubble_fraction(busy=6.0, ranks=2, window=4.0) == 0.25
    assert bubble_fraction(busy=9.0, ranks=2, window=4.0) == 0.0


@pytest.mark.parametrize(("load", "expected"), [(Load(3.0, 4.0), 0.25), (NO_LOAD, None)])
def test_a_step_has_a_bubble_where_one_was_measured(load: Load, expected: float | None) -> None:
    share = RankShare(torch.tensor(1.0), torch.tensor(4.0), stop=False, busy=load.busy, window=load.window)
    totals = StepReduction(share).read(1)
    assert (totals.loss, totals.grad_norm, totals.bubble_fraction) == (1.0, 2.0, expected)
