"""Climbs ladders in processes that end in planned ways."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from ladder_runs import quick_plan
from programs import clean

from benchmarks.recording_reporter import RecordingReporter
from service.compilation import plans
from service.compilation.activity import Activity
from service.compilation.climber_process import Climbed
from service.compilation.climbers import climb_apart
from service.compilation.forks import Forks, Seat
from service.compilation.prepare import Prepared
from service.compilation.program import Parts, Program, Step
from service.compilation.run.observation import RungCase
from service.compilation.rungs import LADDER
from service.compilation.time_share import ENDLESS, TimeShare
from service.jobs.spec.compile import Phase
from service.parallel.boundary import StepBoundary
from workers.forks import threads

LOW = LADDER[:2]
PHASES: tuple[Phase, Phase] = ("train", "inference")
EACH_PHASE: plans.Plan = tuple(tuple(RungCase(rung, phase) for rung in LOW) for phase in PHASES)
WHOLE: plans.Plan = (tuple(case for part in EACH_PHASE for case in part),)


def skip_unless_it_can_fork() -> None:
    """Skip a test in a process that cannot be forked."""
    if any(name.startswith("pt_autograd") for name in threads()):  # where PyTorch is built for CUDA, after a backward
        pytest.skip("a backward ran in this process before, so it cannot be forked; this file passes by itself")


def is_compiled(parts: Parts) -> bool:
    return any(module._compiled_call_impl is not None for part in parts.modules.values() for module in part.modules())


@dataclass(frozen=True)
class Ending:
    """A sound program that ends its process in a phase, by a signal, where it is ``compiled`` or where it is not."""

    phase: Phase
    number: int
    compiled: bool = True
    device: torch.device = clean.PERCEPTRON.device
    period: int = clean.PERCEPTRON.period

    def build(self, dtype: torch.dtype) -> Parts:
        return clean.PERCEPTRON.build(dtype)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        self._end("train", parts)
        yield from clean.PERCEPTRON.train(parts, boundary)

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        self._end("inference", parts)
        yield from clean.PERCEPTRON.inference(parts, boundary)

    def _end(self, phase: Phase, parts: Parts) -> None:
        if phase == self.phase and is_compiled(parts) == self.compiled:
            faulthandler.disable()  # its stacks are no news here
            os.kill(os.getpid(), self.number)


def prepared(program: Program = clean.PERCEPTRON) -> Callable[[], Prepared]:
    return lambda: Prepared(program, quick_plan(program, 4), os.getpid())


def climbed(
    prepare: Callable[[], Prepared],
    planned: plans.Plan,
    *coarser: plans.Plan,
    stop: bool = False,
    share: TimeShare = ENDLESS,
    spare: int = 2,
) -> tuple[list[Climbed], list[int]]:
    """Return what came of the processes, and those that were ready."""
    told: list[tuple[int, None]] = []

    def serve(seat: Seat) -> None:
        seat.tasks.recv().climb(prepare, seat)

    processes = Forks.ready(serve, len(planned), spare)
    try:
        activity = Activity(RecordingReporter(), 1)
        return list(
            climb_apart(processes, [planned, *coarser], lambda: stop, told.append, watcher=activity, share=share)
        ), [process for process, _ in told]
    finally:
        processes.end()
