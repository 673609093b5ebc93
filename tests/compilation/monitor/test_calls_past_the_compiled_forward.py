"""Each module that was to be compiled must be seen called compiled: else nothing of it was proved."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from ladder_runs import Ascend
from lanes import first_fast, slow_but_for
from programs import callings
from programs.callings import Calling, Lens

from service.compilation.detectors.uncalled import compiled_units
from service.compilation.monitor.uncompiled_calls import Called, counted_calls
from service.compilation.rungs import LADDER, RUNGS
from service.jobs.spec.compile import Phase

PHASES: tuple[Phase, ...] = ("train", "inference")
INSTEAD = "which does not go through the compiled forward; call lens(...) itself"
BY_SCORE, BY_FORWARD = (
    f"the program calls lens.score N times, {INSTEAD}",
    f"the program calls lens.forward N times, {INSTEAD}",
)


@pytest.mark.parametrize("phase", first_fast(1, PHASES))
@pytest.mark.parametrize(
    ("scores", "how"),
    [
        (callings.by_method, BY_SCORE),
        (callings.by_forward, BY_FORWARD),
        (callings.by_boundary, BY_SCORE),
        (callings.not_at_all, "no call of it was seen in PHASE"),
    ],
)
def test_a_module_that_is_never_called_compiled_is_vacuous_and_named(
    ascend: Ascend, scores: callings.Scoring, how: str, phase: Phase
) -> None:
    first, second = ascend(Calling(scores), phases=(phase,))
    assert (first.verdict, second.verdict) == ("vacuous", "not_reached")
    (finding,) = first.findings
    expected = f"lens was never called compiled: {how.replace('PHASE', phase)}"
    assert re.sub(r"\d+", "N", finding.message) == expected


PASSING = [
    Calling(callings.by_itself),
    Calling(callings.by_way_of_itself),
    Calling(callings.both_ways),
    Calling(callings.within_another, nested=True),
]


@pytest.mark.parametrize("phase", first_fast(1, PHASES))
@pytest.mark.parametrize(
    "program",
    slow_but_for(PASSING, *PASSING[2:]),
    ids=lambda program: program.scores.__name__,
)
def test_a_module_that_is_called_compiled_passes(ascend: Ascend, program: Calling, phase: Phase) -> None:
    (result,) = ascend(program, rungs=LADDER[:1], phases=(phase,))
    assert result.verdict == "pass", result.findings
    assert result.observation is not None
    notes = [note for note in result.observation.notes if "compiled forward" in note]
    bypassed = ["lens.score is called N times, which does not go through the compiled forward of lens"]
    assert [re.sub(r"\d+", "N", note) for note in notes] == (bypassed if program.scores is callings.both_ways else [])


def test_each_phase_is_judged_by_its_own_calls(ascend: Ascend) -> None:
    results = ascend(Calling(callings.only_in_training), rungs=LADDER[:1], phases=PHASES)
    assert [(result.case.phase, result.verdict) for result in results] == [("train", "pass"), ("inference", "vacuous")]


def test_the_rehearsal_of_cuda_graphs_sees_it_too(ascend: Ascend) -> None:
    (result,) = ascend(Calling(callings.by_method), rungs=[RUNGS["reduce-overhead"]])
    assert any("rehearsed without CUDA: lens was never called compiled" in each.message for each in result.findings)


def test_calls_are_counted_by_way_and_classes_are_left_as_they_were() -> None:
    lens, other = Lens(), Lens()
    before = dict(vars(Lens))
    x = torch.ones(2, callings.FEATURES)
    with counted_calls({"lens": lens}) as calls:
        lens(x)
        lens.score(x)
        lens.scored(x)
        other.score(x)
        copy.deepcopy(lens)(x)
    lens(x)
    assert calls == {Called("lens"): 2, Called("lens", "score"): 1}
    assert dict(vars(Lens)) == before


def test_a_call_that_raises_is_over() -> None:
    lens = Lens()
    with counted_calls({"lens": lens}) as calls:
        with pytest.raises(RuntimeError):
            lens(torch.ones(2, 1))
        lens.score(torch.ones(2, callings.FEATURES))
    assert calls[Called("lens", "score")] == 1


def test_what_is_called_within_a_compiled_module_is_compiled_with_it() -> None:
    calls = {Called("b", within="a"): 1, Called("c", "score", within="b"): 1, Called("d", within="e"): 1}
    assert compiled_units(["a", "b", "c", "d"], ["a"], calls) == {"a", "b", "c"}
