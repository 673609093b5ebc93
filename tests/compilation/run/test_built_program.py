"""Steps of a program, as those who ask for them see them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from programs import sound
from torch import Tensor, nn

from service.compilation.program import Parts, Step
from service.compilation.run.built_program import build, record_step
from service.compilation.run.recorded_run import record_run
from service.jobs.spec.compile import Phase
from service.parallel.boundary import StepBoundary


class Suspended(sound.SoundProgram):
    """Hands its outputs over from within ``no_grad``, which it enters once."""

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        with torch.no_grad():
            while True:
                boundary.step_boundary()
                yield Step(outputs={"scores": self._scores(parts, boundary)})


def test_a_program_within_no_grad_takes_the_gradients_of_no_other() -> None:
    program = Suspended(sound.bare)
    inferring, training = build(program, "inference"), build(program, "train")
    for _ in range(2):
        assert not inferring.step().outputs["scores"].requires_grad
        assert torch.is_grad_enabled()
        assert training.step().losses["loss"] > 0


class Augmented(nn.Linear):
    """Moves its inputs by what NumPy and Python draw."""

    def __init__(self) -> None:
        super().__init__(sound.FEATURES, sound.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(np.random.normal()) * random.random())


def test_a_step_draws_what_its_seed_says() -> None:
    """Two runs of a program that draws with NumPy or Python would be compared as noise."""
    first, again, other = (record_step(build(sound.SoundProgram.of(Augmented), "train"), seed) for seed in (1, 1, 2))
    assert first.drew
    assert torch.equal(first.tensors["loss", "loss"], again.tensors["loss", "loss"])
    assert not torch.equal(first.tensors["loss", "loss"], other.tensors["loss", "loss"])
    assert first.generators == again.generators


def test_buffers_are_no_results_of_a_step() -> None:
    """Of some the seed changes nothing: the rounding of half precision would stand out among their distributions."""
    program = sound.SoundProgram(lambda: {"net": nn.Sequential(sound.bare()["net"], nn.BatchNorm1d(sound.CLASSES))})
    assert {kind for kind, _ in record_step(build(program, "train"), 1).tensors} == {"loss", "output", "gradient"}


class Packed(Tensor):
    """Holds its numbers in another tensor, and can only be copied, as weights of a quantised backbone."""

    def __new__(cls, held: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__.split(".")[0] not in ("detach", "_to_copy", "copy_"):
            raise NotImplementedError(function)
        found = function(*(getattr(each, "held", each) for each in args), **(kwargs or {}))
        return args[0] if function.__name__.startswith("copy_") else cls(found)


@pytest.mark.parametrize("phase", get_args(Phase))
def test_frozen_weights_without_arithmetic_stay_and_are_compared_by_what_they_hold(phase: Phase) -> None:
    packed = nn.Parameter(Packed(torch.ones(2)), requires_grad=False)

    def modules() -> dict[str, nn.Module]:
        body = nn.Linear(sound.FEATURES, sound.FEATURES)
        body.register_parameter("packed", packed)
        return {"body": body, **sound.bare()}

    run = record_run(build(sound.SoundProgram(modules), phase), 2)
    frozen = {name for kind, name in run.tensors[2] if kind == "frozen parameter"}
    assert {"body.weight", "body.bias", "body.packed.held"} <= frozen
    assert run.starts[0].nudged(2).is_same(run.starts[0].numbers()) is False


class Halved(sound.SoundProgram):
    """Is in half precision, whatever it is asked for."""

    def build(self, dtype: torch.dtype) -> Parts:
        return super().build(torch.bfloat16)


def test_half_precision_is_nothing_exact_to_judge_by() -> None:
    assert build(Halved(sound.bare), "train").trainable
    with pytest.raises(TypeError, match=r"in torch.bfloat16; expected torch.float64: half precision takes the place"):
        build(Halved(sound.bare), "train", dtype=torch.float64)
