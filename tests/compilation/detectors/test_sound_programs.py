"""Ways of writing a program that are right raise no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ladder_runs import Ascend
from lanes import first_fast
from packaging.version import Version
from programs import sound
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import grad

from service.compilation.program import Parts, Step
from service.compilation.report.publishing import highest_safe
from service.compilation.rungs import RUNGS, Rung
from service.compilation.selftest import backends
from service.parallel.boundary import StepBoundary

BELOW_CODE = [RUNGS["eager"], RUNGS["aot_eager"]]


@pytest.mark.parametrize(("modules", "graphs"), first_fast(1, [(sound.bare, 1), (sound.frozen_backbone, 2)]))
def test_modules_of_torch_itself_are_compiled(
    ascend: Ascend, modules: Callable[[], dict[str, nn.Module]], graphs: int
) -> None:
    results = ascend(sound.SoundProgram(modules), BELOW_CODE, phases=("train", "inference"))
    assert [(result.verdict, result.findings) for result in results] == [("pass", ())] * 4
    assert [result.observation.evidence.graphs for result in results if result.observation] == [graphs] * 4


class Following(sound.SoundProgram):
    """Lets its frozen body follow a layer of what it trains."""

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        followed = next(each for each in parts.modules["net"].modules() if isinstance(each, nn.Linear))
        for step in super().train(parts, boundary):
            with torch.no_grad():
                parts.modules["body"].weight.lerp_(followed.weight, 0.1)
            yield step


def following() -> dict[str, nn.Module]:
    return {"body": nn.Linear(sound.FEATURES, sound.FEATURES), **sound.checkpointed()}


@pytest.mark.parametrize("program", [sound.SoundProgram(sound.checkpointed), Following(following, period=2)])
def test_a_rung_that_alone_draws_other_numbers_does_not_apply_and_the_ladder_goes_on(
    ascend: Ascend, program: sound.SoundProgram
) -> None:
    """Dynamo's backend ``eager`` draws others since torch 2.13, and the same in torch 2.11."""
    first, second = ascend(program, BELOW_CODE)
    if Version(torch.__version__).release >= (2, 13):
        assert first.verdict == "not_applicable"
        assert first.findings[0].message.startswith("Dynamo's backend eager computes a checkpointed block again with")
    assert (second.verdict, second.findings) == ("pass", ())
    assert highest_safe([first, second], "train") is second


class AskingForGradients(sound.SoundProgram):
    """Asks for gradients by a function's own name, and names what it gives to it."""

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        (optimizer,) = parts.optimizers
        while True:
            boundary.step_boundary()
            loss = self._scores(parts, boundary).square().mean()
            trained = [*parts.modules["net"].parameters()]
            for parameter, gradient in zip(trained, grad(outputs=loss, inputs=trained), strict=True):
                parameter.grad = gradient
            optimizer.step()
            yield Step({"loss": loss.detach()})


class Quantised(nn.Linear):
    """Holds numbers of 8 bits, in a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(sound.FEATURES, sound.FEATURES)
        self.scale = nn.Parameter(torch.ones(sound.FEATURES).to(torch.float8_e5m2), requires_grad=False)
        self.register_buffer("shift", torch.ones(sound.FEATURES).to(torch.float8_e4m3fn))

    def _apply(self, fn: Any, recurse: bool = True) -> Quantised:
        own = self.scale, self.shift
        super()._apply(fn, recurse)
        self.scale.data, self.shift = own[0].data, own[1]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.to(x.dtype) + self.shift.to(x.dtype)


def quantised() -> dict[str, nn.Module]:
    return {"body": Quantised(), "net": nn.Linear(sound.FEATURES, sound.CLASSES)}


@pytest.mark.parametrize("program", [AskingForGradients(sound.bare), sound.SoundProgram(quantised)])
def test_whatever_it_calls_and_holds_it_passes(ascend: Ascend, program: sound.SoundProgram) -> None:
    for result in ascend(program, BELOW_CODE, phases=("train", "inference")):
        assert (result.verdict, result.findings) == ("pass", ())


@pytest.mark.slow
def test_wrong_gradients_of_a_program_that_draws_but_checkpoints_nothing_are_a_fault(ascend: Ascend) -> None:
    wrong = replace(RUNGS["eager"], backend=backends.wrong_gradients)
    (first,) = ascend(sound.SoundProgram(sound.dropping), [wrong])
    assert first.verdict == "fail_parity"


@pytest.mark.slow
def test_wrong_outputs_are_a_fault_also_with_checkpoints(ascend: Ascend) -> None:
    wrong = replace(RUNGS["aot_eager"], backend=backends.wrong_outputs)
    *_, last = ascend(sound.SoundProgram(sound.checkpointed), [RUNGS["eager"], wrong])
    assert last.verdict == "fail_parity"


def _without_rounding(value: Any) -> Any:
    return value.where(value.abs() > 1e-6, 0.0) if isinstance(value, Tensor) else value


def test_a_parameter_that_only_rounding_moves_need_not_move(ascend: Ascend) -> None:
    exact = aot_autograd(fw_compiler=backends._as_is, bw_compiler=backends._altering(_without_rounding))
    (result,) = ascend(sound.SoundProgram(sound.normalised), [Rung("exact", exact)])
    assert (result.verdict, result.findings) == ("pass", ())
    assert result.observation is not None
    assert result.observation.training is not None
    assert "0.bias" not in result.observation.training.moved
