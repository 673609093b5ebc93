"""Mistakes in the use of CUDA graphs, each found and named without a GPU: rehearsed, results go wrong as they would."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import pytest
import torch
from ladder_runs import Ascend
from lanes import first_fast
from programs import keeping, loops, storing
from programs.registry import CLEAN, DEFECTS, Planted
from set_aside import nothing_set_aside
from torch import Tensor

from service.compilation.judgement import Result
from service.compilation.monitor.usage import Lifetimes
from service.compilation.program import Step
from service.compilation.run.baseline import make_baseline
from service.compilation.run.observation import RungCase
from service.compilation.run.observe_rung import observe_rung
from service.compilation.run.run_plan import plan_run
from service.compilation.rungs import RUNGS, Rung
from service.jobs.spec.compile import Tolerance
from service.parallel.boundary import LiveResults, Origin, caller, holders

CPU = torch.device("cpu")
STEPS = 6


def rehearsed(ascend: Ascend, planted: Planted) -> Result:
    (result,) = ascend(planted.program(CPU), rungs=[RUNGS["reduce-overhead"]], phases=(planted.phase,), steps=STEPS)
    assert result.verdict == "not_applicable"
    assert result.observation is None
    return result


@pytest.mark.parametrize("planted", first_fast(1, CLEAN), ids=lambda planted: planted.name)
def test_loops_without_a_mistake_raise_no_alarm(ascend: Ascend, planted: Planted) -> None:
    result = rehearsed(ascend, planted)
    (finding,) = result.findings
    assert finding.message == "CUDA graphs need a CUDA device; this program runs on cpu"
    assert result.rehearsal is not None
    assert result.rehearsal.compared > STEPS


def test_what_only_refers_to_itself_holds_nothing(ascend: Ascend) -> None:
    result = rehearsed(ascend, Planted(loops.leaving_cycles, "inference"))
    assert [finding.verdict for finding in result.findings] == ["not_applicable"], result.findings


@pytest.mark.parametrize("planted", first_fast(4, DEFECTS), ids=lambda planted: planted.name)
def test_a_mistake_is_found_and_named(ascend: Ascend, planted: Planted) -> None:
    result = rehearsed(ascend, planted)
    found = [finding for finding in result.findings if finding.verdict == planted.verdict]
    assert any(all(words in finding.message for words in planted.words) for finding in found), result.findings
    wrong = any(finding.verdict == "fail_parity" for finding in result.findings)
    assert wrong == planted.wrong


@pytest.mark.parametrize("name", first_fast(1, keeping.COPIES))
def test_results_that_are_copied_raise_no_alarm(ascend: Ascend, name: str) -> None:
    result = rehearsed(ascend, Planted(keeping.keeping(name, keeping.COPIES[name]), "inference"))
    assert [finding.verdict for finding in result.findings] == ["not_applicable"], result.findings


@pytest.mark.parametrize("name", first_fast(1, keeping.ALIASES))
def test_results_that_only_look_copied_are_found(ascend: Ascend, name: str) -> None:
    result = rehearsed(ascend, Planted(keeping.keeping(name, keeping.ALIASES[name]), "inference"))
    messages = [finding.message for finding in result.findings if finding.verdict == "fail_lifetime"]
    assert any("held over a replay" in message and "State.scores[" in message for message in messages), result.findings
    assert any(finding.verdict == "fail_parity" for finding in result.findings)


@pytest.mark.parametrize("planted", first_fast(2, storing.DEFECTS), ids=lambda planted: planted.name)
def test_what_is_read_too_late_is_named_with_its_holder_and_the_line_that_reads_it(
    ascend: Ascend, planted: Planted
) -> None:
    with nothing_set_aside() if planted.name == "through_a_closure" else nullcontext():
        result = rehearsed(ascend, planted)
    (message,) = [finding.message for finding in result.findings if finding.verdict == "fail_lifetime"]
    assert f"read at {storing.read_by(planted)}" in message
    assert ", called at " in message
    assert all(holder in message for holder in storing.HOLDERS[planted.name]), message
    assert ("may be held by" in message) == (" or by " in message)
    assert result.rehearsal is not None
    assert result.rehearsal.usage.reads[0].iteration == 1


class HandingOverLate(loops.LoopProgram):
    """Hands over, unread, what it scored before the step."""

    def _steps(self, state: loops.State) -> Iterator[Step]:
        seen = torch.zeros(())
        for state.step in count():
            yield replace(loops.once(state), outputs={"seen": seen})
            with torch.no_grad():
                seen = state.call(state.batch(1))


def test_what_a_step_yields_is_read_there(ascend: Ascend) -> None:
    (result,) = ascend(HandingOverLate(loops.once), rungs=[RUNGS["reduce-overhead"]], phases=("train",), steps=STEPS)
    line = inspect.getsourcelines(HandingOverLate._steps)[1] + 3
    (message,) = [finding.message for finding in result.findings if finding.verdict == "fail_lifetime"]
    assert f"read at {__file__}:{line} in _steps" in message


@pytest.mark.parametrize("name", first_fast(1, ["reading_late", "comparing"]))
def test_what_only_lives_until_the_next_result_is_not_blamed(ascend: Ascend, name: str) -> None:
    planted = next(each for each in (*storing.DEFECTS, *DEFECTS) if each.name == name)
    messages = " ".join(finding.message for finding in rehearsed(ascend, planted).findings)
    assert not re.findall(r"\b(scores|loss|change|new), a variable", messages)


@pytest.mark.parametrize(
    "planted", first_fast(1, storing.INNOCENT), ids=lambda planted: f"{planted.name} {planted.make.__name__}"
)
def test_what_is_stored_and_read_in_time_or_copied_raises_no_alarm(ascend: Ascend, planted: Planted) -> None:
    assert [finding.verdict for finding in rehearsed(ascend, planted).findings] == ["not_applicable"]


@pytest.mark.slow
@pytest.mark.parametrize("rung", first_fast(1, [Rung("watched", "aot_eager", rehearses=True), RUNGS["aot_eager"]]))
def test_what_the_program_has_compiled_itself_is_not_compiled_anew_for_having_been_watched(rung: Rung) -> None:
    program = loops.LoopProgram(loops.compiling_its_own)
    plan = plan_run(program, STEPS, Tolerance(), lambda seconds: seconds)
    seen = observe_rung(program, RungCase(rung, "train"), make_baseline(program, "train", plan.iterations), plan)
    assert seen.error == ""
    assert seen.evidence.graphs >= 2
    assert seen.evidence.late == ()


class Weighing(loops.Scorer):
    def forward(self, x: Tensor, kind: type) -> Tensor:
        scores: Tensor = kind.factor * super().forward(x)  # type: ignore[attr-defined]  # made by the loop
        return scores


class Beginning(loops.LoopProgram):
    """Makes, when it begins, what its code is compiled for, as a cache of keys is made for which CUDA graphs are."""

    def _steps(self, state: loops.State) -> Iterator[Step]:
        kind = type("Kind", (), {"factor": 2.0})
        for state.step in count():
            state.boundary.step_boundary()
            state.optimizer.zero_grad()
            loss = state.boundary.boundary_call(state.scorer, state.batch(), kind).square().mean()
            loss.backward()
            state.optimizer.step()
            yield Step({"loss": loss.detach().clone()})


def test_what_a_program_makes_when_it_is_begun_again_to_be_timed_is_compiled_for_once_more(ascend: Ascend) -> None:
    (result,) = ascend(Beginning(loops.once, make=Weighing), [RUNGS["eager"]])
    assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.slow
def test_calls_from_another_thread_and_past_the_boundary_are_noted(ascend: Ascend) -> None:
    result = rehearsed(ascend, Planted(loops.scoring_in_a_thread))
    assert result.rehearsal is not None
    notes = "\n".join(result.rehearsal.notes)
    assert "called from several threads: MainThread, telemetry" in notes
    assert "called past the boundary: scorer, called at" in notes
    threads = {call.thread: count for call, count in result.rehearsal.usage.invocations.items()}
    assert threads == {"MainThread": 2 * STEPS, "telemetry": 2 * STEPS}  # from one state, and free


def test_what_became_of_results_is_counted(ascend: Ascend) -> None:
    kept = rehearsed(ascend, next(each for each in CLEAN if each.kept))
    consumed = rehearsed(ascend, CLEAN[0])
    assert kept.rehearsal is not None
    assert consumed.rehearsal is not None
    assert kept.rehearsal.usage.lifetimes["scorer"] == Lifetimes(consumed=0, copied=STEPS, held=0)
    assert consumed.rehearsal.usage.lifetimes["scorer"] == Lifetimes(consumed=2 * STEPS, copied=0, held=0)


def test_a_result_that_no_longer_tells_where_it_is_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, outputs = loops.State(None, None, CPU), LiveResults()  # type: ignore[arg-type]
    owner.scores.append(torch.ones(2))
    outputs.note(Origin("scorer", caller(outside=()), 0), owner.scores)
    # So do tensors whose memory CUDA graphs have given to others, while they are recorded.
    monkeypatch.setattr(holders, "_storage", lambda tensor: -1)
    (held,) = outputs.held(before=1)
    assert any("State.scores[0]" in name for name in held.holders)
