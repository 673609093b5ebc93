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

DEFECTS: tuple[Planted, ...] = (
    Planted(loops.holding, "inference", "fail_lifetime", ("held over a replay", "State.scores[")),
    Planted(loops.comparing, "inference", "fail_lifetime", ("held over a replay", "State.scores[0]")),
    Planted(
        loops.marking_each_forward,
        verdict="fail_lifetime",
        words=("a step is marked at", "marking_each_forward", "up to 2 backwards are still to run, of scorer"),
    ),
    Planted(
        loops.marking_telemetry,
        verdict="fail_lifetime",
        words=("a step is marked at", "marking_telemetry", "up to 1 backwards are still to run"),
    ),
    Planted(
        loops.accumulating_unmarked,
        verdict="fail_lifetime",
        words=("gradients are accumulated or used over replays", "accumulating_unmarked", "first.weight"),
    ),
    Planted(
        loops.marking_each_micro_batch,
        verdict="fail_lifetime",
        words=("gradients are accumulated or used over replays", "marking_each_micro_batch", "first.weight"),
    ),
    Planted(
        loops.stepping_late,
        verdict="fail_lifetime",
        words=("gradients are accumulated or used over replays", "stepping_late", "first.weight"),
        wrong=False,
    ),
    Planted(
        loops.watching_late,
        verdict="fail_lifetime",
        words=("gradients are accumulated or used over replays", "in call", "first.weight"),
        wrong=False,
    ),
    Planted(
        loops.calling_in_backward,
        verdict="fail_lifetime",
        words=("scorer is called again within a running backward", "rescore"),
    ),
    Planted(loops.growing, verdict="unstable", words=("new shapes in every step", "[2, 4]"), wrong=False),
)
