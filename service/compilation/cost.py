"""What a rung costs: compiling from nothing, compiling from a filled cache, and each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from service.compilation.execution import Subject, build
from service.compilation.internals.caches import forget_compiled
from service.compilation.observation import Case
from service.compilation.program import Program
from service.compilation.timing import Race, Runner, race


def pace(subject: Subject, agree: Callable[[float], float]) -> Race:
    """Race the compiled ``subject`` against the uncompiled program, both from their first step on."""
    program = subject.program
    eager = build(program, subject.phase)
    return race(_runner(eager.restarted()), _runner(subject.restarted()), program.device, agree)


def cold_seconds(seconds: Sequence[float], compiled: Sequence[bool]) -> float:
    """What compiling added to the iterations in which it happened, given the duration of each."""
    busy = [duration for duration, did in zip(seconds, compiled, strict=True) if did]
    quiet = [duration for duration, did in zip(seconds, compiled, strict=True) if not did]
    return max(sum(busy) - len(busy) * (median(quiet) if quiet else 0.0), 0.0)


def warm_seconds(program: Program, case: Case, step_s: float) -> float:
    """Seconds to compile again for every shape with the caches on disk filled and those in memory dropped.

    A new process pays the import of PyTorch besides.
    """
    forget_compiled()
    runner = _runner(build(program, case.phase, case.rung).restarted())
    start = time.perf_counter()
    runner.call()
    return max(time.perf_counter() - start - runner.steps * step_s, 0.0)


def _runner(subject: Subject) -> Runner:
    """Each call visits every input shape."""
    period = subject.program.period

    def call() -> None:
        for _ in range(period):
            subject.step()

    return Runner(call, period)
