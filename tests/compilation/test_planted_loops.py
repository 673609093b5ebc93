"""Mistakes in the use of CUDA graphs, each found and named without a GPU: rehearsed, results go wrong as they would."""

from __future__ import annotations

import pytest
import torch
from conftest import Climb
from programs.registry import CLEAN, DEFECTS, Planted

from service.compilation.ladder import Result
from service.compilation.rungs import RUNGS

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
