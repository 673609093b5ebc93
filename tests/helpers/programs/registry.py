"""Every program around a compiled module: which phase it is of, and by which words its defect is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from programs import loops
from service.compilation.verdicts import Verdict
from service.jobs.spec.compile import Phase


@dataclass(frozen=True)
class Planted:
    """A step, and what is to be found of it under CUDA graphs: nothing where ``verdict`` is ``pass``.

    ``wrong``: results differ from those of the uncompiled program, so that an error or a wrong value may be seen too.
    """

    step: loops.StepOf
    phase: Phase = "train"
    verdict: Verdict = "pass"
    words: tuple[str, ...] = ()
    wrong: bool = True
    kept: tuple[str, ...] = ()
    make: Callable[[], nn.Module] = loops.Scorer

    @property
    def name(self) -> str:
        return self.step.__name__

    def program(self, device: torch.device) -> loops.LoopProgram:
        return loops.LoopProgram(self.step, device, self.kept, make=self.make)


CLEAN: tuple[Planted, ...] = (
    Planted(loops.once),
    Planted(loops.unmarked),
    Planted(loops.many_forwards),
    Planted(loops.accumulating),
    Planted(loops.in_place_gradients),
    Planted(loops.telemetry),
    Planted(loops.late_to_drop),
    Planted(loops.in_turns),
    Planted(loops.compiling_its_own),
    Planted(loops.remembering, "inference", kept=("scorer",)),
)

_OVER_REPLAYS = "gradients are accumulated or used over replays"


def _breaks_lifetimes(step: loops.StepOf, *words: str, wrong: bool = True) -> Planted:
    return Planted(step, verdict="fail_lifetime", words=words, wrong=wrong)


DEFECTS: tuple[Planted, ...] = (
    Planted(loops.holding, "inference", "fail_lifetime", ("held over a replay", "State.scores[")),
    Planted(loops.comparing, "inference", "fail_lifetime", ("held over a replay", "State.scores[0]")),
    _breaks_lifetimes(
        loops.marking_each_forward,
        *("a step is marked at", "marking_each_forward", "up to 2 backwards are still to run, of scorer"),
    ),
    _breaks_lifetimes(
        loops.marking_telemetry, "a step is marked at", "marking_telemetry", "up to 1 backwards are still to run"
    ),
    _breaks_lifetimes(loops.accumulating_unmarked, _OVER_REPLAYS, "accumulating_unmarked", "first.weight"),
    _breaks_lifetimes(loops.marking_each_micro_batch, _OVER_REPLAYS, "marking_each_micro_batch", "first.weight"),
    _breaks_lifetimes(loops.stepping_late, _OVER_REPLAYS, "stepping_late", "first.weight", wrong=False),
    _breaks_lifetimes(loops.watching_late, _OVER_REPLAYS, "in call", "first.weight", wrong=False),
    _breaks_lifetimes(loops.calling_in_backward, "scorer is called again within a running backward", "rescore"),
    Planted(loops.growing, verdict="unstable", words=("new shapes in every step", "[2, 4]"), wrong=False),
)
