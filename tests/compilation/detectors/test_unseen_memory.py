"""Stale memory that holds the right numbers: it is looked for where no comparison could see it."""

from __future__ import annotations

import pytest
import torch
from programs import sound

from service.compilation.detectors import judge
from service.compilation.program import Step
from service.compilation.run.baseline import make_baseline
from service.compilation.run.observation import Observation, RungCase
from service.compilation.run.observe_rung import rehearse_rung
from service.compilation.rungs import REHEARSAL
from service.compilation.selftest.faults import (
    FEATURES,
    ROWS,
    Choosing,
    FaultyLoop,
    FaultyProgram,
    Scorer,
    reads_unseen,
)
from service.compilation.selftest.run import PLAN


class Counting(Scorer):
    """Counts the numbers above 0 that it is given, whatever its parameters are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax(-1) * 0 + (x > 0).sum(-1)


def chooses(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    return Step(outputs={"chosen": loop.score(torch.ones(ROWS, FEATURES, dtype=loop.parts.dtype)).clone()})


def chooses_of_others(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    return Step(outputs={"chosen": loop.score(3 * loop.batch()).clone()})


def chooses_and_keeps(loop: FaultyLoop) -> Step:
    loop.boundary.step_boundary()
    loop.past = [loop.score(torch.ones(ROWS, FEATURES, dtype=loop.parts.dtype))]
    return Step(outputs={"chosen": loop.past[0].clone()})


def rehearsed(program: FaultyProgram) -> Observation:
    baseline = make_baseline(program, "inference", PLAN.iterations)
    return rehearse_rung(program, RungCase(REHEARSAL, "inference"), baseline, PLAN)


@pytest.mark.parametrize(
    "program",
    [
        FaultyProgram(chooses_and_keeps, Choosing),
        pytest.param(FaultyProgram(chooses, Counting), marks=pytest.mark.slow),
    ],
)
def test_a_choice_that_never_changes_passes_where_it_is_proved_new_and_the_report_says_so(
    program: FaultyProgram,
) -> None:
    seen = rehearsed(program)
    assert judge(seen) == ()
    (note,) = seen.notes
    assert note.startswith("a stale value would be the right one of output chosen, the same in every iteration: with")


@pytest.mark.parametrize("program", [FaultyProgram(chooses), FaultyProgram(chooses_of_others, Choosing)])
def test_what_changes_from_step_to_step_needs_no_audit(program: FaultyProgram) -> None:
    assert not rehearsed(program).audit.unseen


def test_the_choice_of_the_step_before_is_found_although_it_is_the_right_one() -> None:
    seen = rehearsed(FaultyProgram(reads_unseen, Choosing))
    assert all(each.passed for each in seen.comparisons)
    (finding,) = judge(seen)
    assert finding.verdict == "fail_lifetime"
    assert finding.message.startswith("something held over a replay is read: with shuffled parameters output chosen")
    assert "is held by FaultyLoop.past[0]" in finding.message


def test_without_a_proof_nothing_passes_and_it_is_said_what_would_be_one() -> None:
    """What does not depend on parameters is the same whatever they are, and the last one is alive at the next mark."""
    (finding,) = judge(rehearsed(FaultyProgram(chooses_and_keeps, Counting)))
    assert finding.verdict == "vacuous"
    assert finding.message.startswith("stale memory could not be seen in output chosen, the same in every iteration")
    assert "is held by FaultyLoop.past[0]); inputs that change from step to step would show" in finding.message


def test_gradients_that_only_rounding_moves_are_others_in_each_step_and_need_no_audit() -> None:
    program = sound.SoundProgram(sound.normalised)
    baseline = make_baseline(program, "train", PLAN.iterations)
    seen = rehearse_rung(program, RungCase(REHEARSAL, "train"), baseline, PLAN)
    assert (seen.audit.unseen, judge(seen)) == ((), ())
