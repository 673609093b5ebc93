"""Mistakes in the use of CUDA graphs, each found and named without a GPU: rehearsed, results go wrong as they would."""

from __future__ import annotations

import pytest
import torch
from climbing import Climb
from programs import keeping, loops
from programs.registry import CLEAN, DEFECTS, Planted

from service.compilation.ladder import Result
from service.compilation.rungs import RUNGS
from service.compilation.usage import Lifetimes
from service.parallel.boundary import Origin, Outputs, caller, holders

CPU = torch.device("cpu")
STEPS = 6


def rehearsed(ascend: Climb, planted: Planted) -> Result:
    (result,) = ascend(planted.program(CPU), rungs=[RUNGS["reduce-overhead"]], phases=(planted.phase,), steps=STEPS)
    assert result.verdict == "not_applicable"
    assert result.observation is None
    return result


@pytest.mark.parametrize("planted", CLEAN, ids=lambda planted: planted.name)
def test_loops_without_a_mistake_raise_no_alarm(ascend: Climb, planted: Planted) -> None:
    result = rehearsed(ascend, planted)
    (finding,) = result.findings
    assert finding.message == "CUDA graphs need a CUDA device; this program runs on cpu"
    assert result.rehearsal is not None
    assert result.rehearsal.compared > STEPS


@pytest.mark.parametrize("planted", DEFECTS, ids=lambda planted: planted.name)
def test_a_mistake_is_found_and_named(ascend: Climb, planted: Planted) -> None:
    result = rehearsed(ascend, planted)
    found = [finding for finding in result.findings if finding.verdict == planted.verdict]
    assert any(all(words in finding.message for words in planted.words) for finding in found), result.findings
    wrong = any(finding.verdict == "fail_parity" for finding in result.findings)
    assert wrong == planted.wrong


@pytest.mark.parametrize("name", keeping.COPIES)
def test_results_that_are_copied_raise_no_alarm(ascend: Climb, name: str) -> None:
    result = rehearsed(ascend, Planted(keeping.keeping(name, keeping.COPIES[name]), "inference"))
    assert [finding.verdict for finding in result.findings] == ["not_applicable"], result.findings


@pytest.mark.parametrize("name", keeping.ALIASES)
def test_results_that_only_look_copied_are_found(ascend: Climb, name: str) -> None:
    result = rehearsed(ascend, Planted(keeping.keeping(name, keeping.ALIASES[name]), "inference"))
    messages = [finding.message for finding in result.findings if finding.verdict == "fail_lifetime"]
    assert any("held over a replay" in message and "State.scores[" in message for message in messages), result.findings
    assert any(finding.verdict == "fail_parity" for finding in result.findings)


def test_calls_from_another_thread_and_past_the_boundary_are_noted(ascend: Climb) -> None:
    result = rehearsed(ascend, Planted(loops.scoring_in_a_thread))
    assert result.rehearsal is not None
    notes = "\n".join(result.rehearsal.notes)
    assert "called from several threads: MainThread, telemetry" in notes
    assert "called past the boundary: scorer, called at" in notes
    threads = {call.thread: count for call, count in result.rehearsal.usage.invocations.items()}
    assert threads == {"MainThread": 2 * STEPS, "telemetry": 2 * STEPS}  # from one state, and free


def test_what_became_of_results_is_counted(ascend: Climb) -> None:
    kept = rehearsed(ascend, next(each for each in CLEAN if each.kept))
    consumed = rehearsed(ascend, CLEAN[0])
    assert kept.rehearsal is not None
    assert consumed.rehearsal is not None
    assert kept.rehearsal.usage.lifetimes["scorer"] == Lifetimes(consumed=0, copied=STEPS, held=0)
    assert consumed.rehearsal.usage.lifetimes["scorer"] == Lifetimes(consumed=2 * STEPS, copied=0, held=0)


def test_a_result_that_no_longer_tells_where_it_is_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, outputs = loops.State(None, None, CPU), Outputs()  # type: ignore[arg-type]
    owner.scores.append(torch.ones(2))
    outputs.note(Origin("scorer", caller(outside=()), 0), owner.scores)
    # So do tensors whose memory CUDA graphs have given to others, while they are recorded.
    monkeypatch.setattr(holders, "_storage", lambda tensor: -1)
    (held,) = outputs.held(before=1)
    assert any("State.scores[0]" in name for name in held.holders)
