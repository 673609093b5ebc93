"""What the detector of lifetimes makes of results that outlive their step."""

from __future__ import annotations

import pytest

from service.compilation.detectors.lifetime import detect
from service.compilation.monitor.usage import Mark, RetainedRead, Usage
from service.compilation.run.observation import Observation, RungCase
from service.compilation.rungs import REHEARSAL, RUNGS, Rung
from service.parallel.boundary import CallSite, HeldResult, Origin

SITE = CallSite("train.py", 7, "step")
CALL = Origin("lens", SITE, 0)
NAMED = HeldResult(CALL, (2, 3), "float32", ("State.scores",))
UNNAMED = HeldResult(CALL, (2, 3), "float32", ())
PENDING = Mark(1, SITE, (CALL,))


def messages(usage: Usage, rung: Rung = REHEARSAL) -> list[str]:
    return [finding.message for finding in detect(Observation(RungCase(rung, "training"), usage=usage))]


def test_a_result_that_is_held_over_a_replay_is_named_with_its_holder() -> None:
    (message,) = messages(Usage(held=(NAMED,)))
    assert "held over a replay" in message
    assert "State.scores" in message


def test_what_only_the_autograd_graph_holds_is_told_once_by_the_mark_that_came_too_early() -> None:
    assert len(messages(Usage(held=(UNNAMED,)))) == 1
    assert len(messages(Usage(held=(UNNAMED,), marks=(PENDING,)))) == 1
    assert len(messages(Usage(held=(UNNAMED, NAMED), marks=(PENDING,)))) == 2


def test_a_gradient_that_a_result_retains_is_told_once_for_each_line_that_reads_it() -> None:
    reads = tuple(RetainedRead(iteration, SITE, CALL) for iteration in range(3))
    (message,) = messages(Usage(retained=reads))
    assert message.startswith(
        "the gradient that a result of lens retains is read at train.py:7 in step (iterations 0, 1"
    )


@pytest.mark.parametrize("name", ["aot_eager", "inductor"])
def test_results_may_be_held_where_nothing_overwrites_them(name: str) -> None:
    assert messages(Usage(held=(NAMED,)), RUNGS[name]) == []
