"""Steps of a program, as those who ask for them see them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from programs import sound

from service.compilation.program import Parts, Step
from service.compilation.run.built_program import build
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
