"""Parameters that the compiler, or the program itself, keeps from moving."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from ladder_runs import Ascend
from planted import messages, planted, seen, verdicts
from programs import clean, frozen
from torch._dynamo.backends.common import aot_autograd

from service.compilation.report.publishing import gate
from service.compilation.report.summary import summary
from service.compilation.rungs import LADDER, Rung
from service.compilation.selftest import backends


def test_gradients_that_only_the_compiler_loses_freeze_the_rung(ascend: Ascend) -> None:
    rung = Rung("planted", backends.forgets_parameters, compiles_backward=False)
    (result,) = ascend(clean.PERCEPTRON, rungs=[rung])
    assert result.verdict == "frozen"
    assert "no gradient where eager has one: first.bias, first.weight, head.bias, head.weight" in messages(result)


@pytest.mark.slow
def test_a_gradient_that_is_lost_for_one_shape_only_freezes_the_rung(ascend: Ascend) -> None:
    (result,) = ascend(frozen.CUT_OFF_FOR_ONE, rungs=LADDER[:1])
    assert result.verdict == "frozen"
    assert messages(result).startswith("no gradient where eager has one: shift")


@pytest.mark.slow
def test_gradients_that_the_compiler_makes_zero_move_nothing(ascend: Ascend) -> None:
    rung = planted(aot_autograd(fw_compiler=backends._as_is, bw_compiler=backends._altering(_zero)))
    (result,) = ascend(clean.PERCEPTRON, rungs=[rung])
    assert result.verdict == "frozen"
    assert "updates do not move what they move in eager: first.bias, first.weight, head.bias, " in messages(result)
    training = seen(result).training
    assert training is not None
    assert not training.moved
    assert not training.unreached


def _zero(value: Any) -> Any:
    return value * 0 if isinstance(value, torch.Tensor) else value


def test_updates_that_move_nothing_in_eager_either_are_frozen(ascend: Ascend) -> None:
    flat = replace(clean.PERCEPTRON, loss=lambda outputs, targets: outputs.sum() * 0)
    (result,) = ascend(flat, rungs=LADDER[:1])
    assert result.verdict == "frozen"
    assert messages(result) == "no parameter was moved by any update, in eager neither"


@pytest.mark.slow
def test_a_step_that_is_hardly_compiled_is_vacuous(ascend: Ascend) -> None:
    """The model is, but nearly all operators of a step are not."""
    (result,) = ascend(replace(clean.PERCEPTRON, loss=_heavy), rungs=LADDER[:1])
    assert result.verdict == "vacuous"
    assert "of a step's operators run in compiled code" in messages(result)


def _heavy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    work = torch.ones(2, dtype=outputs.dtype)
    for _ in range(5000):
        work = work * work
    return torch.nn.functional.cross_entropy(outputs, targets) * work.mean()


def test_parameters_behind_a_detach_are_frozen_in_eager_too(ascend: Ascend) -> None:
    (result,) = ascend(frozen.CUT_OFF, rungs=LADDER[:1])
    assert result.verdict == "frozen"
    assert "in eager neither: first.bias, first.weight;" in messages(result)
    assert "head" not in messages(result)


def test_parameters_that_no_loss_depends_on_are_noted_and_close_no_gate(ascend: Ascend) -> None:
    results = ascend(frozen.UNUSED)
    assert verdicts(results) == ["pass"] * 2
    noted = "no gradient, in eager neither, and no loss depends on them: pooler.bias, pooler.weight, spare"
    assert all(noted in seen(result).notes for result in results)
    told = " ".join(summary(results, gate(results, ["train"], {}, None)))
    left = "pooler.bias, pooler.weight, spare"
    assert f"Training does not change {left}, in eager either: no loss depends on them." in told


def test_what_is_cut_off_is_told_from_what_is_not_used(ascend: Ascend) -> None:
    (result,) = ascend(frozen.CUT_OFF_BESIDE_UNUSED, rungs=LADDER[:1])
    assert result.verdict == "frozen"
    assert "in eager neither: first.bias, first.weight;" in messages(result)
    assert not re.search(r"pooler|spare", messages(result))


@pytest.mark.slow
def test_a_parameter_that_is_not_used_and_that_only_compiled_updates_move_is_a_fault(ascend: Ascend) -> None:
    """Compiled code gives it a gradient of zeros, where eager has none, and weight decay makes the difference."""
    results = ascend(frozen.DECAYING)
    assert verdicts(results) == ["pass", "fail_parity"]
    assert "parameter pooler." in messages(results[1])


@pytest.mark.slow
def test_a_model_without_trainable_parameters_is_frozen_for_training_only(ascend: Ascend) -> None:
    results = ascend(frozen.UNTRAINABLE, rungs=LADDER[:1], phases=("train", "inference"))
    assert verdicts(results) == ["frozen", "pass"]
