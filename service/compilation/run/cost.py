"""Measures what a rung costs: compiling from nothing, compiling from a filled cache, and each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch

from service.compilation.program import Program
from service.compilation.run.observation import RungCase, Timed
from service.compilation.run.program_run import ProgramRun, build
from service.compilation.run.timing import RaceSettings, Runner, race
from service.compilation.torch_internals.caches import empty_caches, forget_compiled, take_machine_code
from service.compilation.torch_internals.profile import Profile, profiled

log = logging.getLogger(__name__)
_PROFILED = (3, 9)
"""Steps in a profile, at least: of long ones, and of those that a busy machine may easily disturb."""
_LONG_S = 0.1


def pace(
    program_run: ProgramRun, agree: Callable[[float], float], settings: RaceSettings, *, beside_eager: bool = True
) -> Timed:
    """Time the compiled ``program_run`` from where it is, before any input shape, beside the uncompiled program from
    its first step on; a profile of the latter is made where it is to be compared, ``beside_eager``.
    """
    program = program_run.program
    eager, compiled = build(program, program_run.phase), program_run
    raced = race(_runner(eager), _runner(compiled), program.device, agree, settings)
    steps = max(program.period, _PROFILED[agree(raced.step_s) < _LONG_S])
    return Timed(raced, _profile(compiled, steps), _profile(eager, steps) if beside_eager else None)


def _profile(program_run: ProgramRun, steps: int) -> Profile | None:
    try:
        return profiled(program_run.step, steps, program_run.program.device)
    except RuntimeError as error:  # as where another profiler holds the device
        log.warning("no profile: %s", error)
        return None


def cold_seconds(seconds: Sequence[float], compiled: Sequence[bool]) -> float:
    """Return what compiling added to the iterations in which it happened, given the duration of each."""
    busy = [duration for duration, did in zip(seconds, compiled, strict=True) if did]
    quiet = [duration for duration, did in zip(seconds, compiled, strict=True) if not did]
    return max(sum(busy) - len(busy) * (median(quiet) if quiet else 0.0), 0.0)


def warm_seconds(program: Program, case: RungCase, step_s: float, cache: bytes | None, folder: Path) -> float:
    """Return the seconds to compile again for every shape with a filled cache.

    The rung starts in an empty folder with the portable ``cache`` and the machine code of ``folder``, as a job on this
    host does; without a portable cache it has the folder's. A new process pays the import of PyTorch besides.
    """
    with empty_caches() if cache is not None else nullcontext(folder) as own:
        if own != folder:
            take_machine_code(folder, own)
        forget_compiled()
        runner = _runner(build(program, case.phase, case.rung).restarted())
        start = time.perf_counter()
        if cache is not None:
            torch.compiler.load_cache_artifacts(cache)
        runner.call()
        return max(time.perf_counter() - start - runner.steps * step_s, 0.0)


def _runner(program_run: ProgramRun) -> Runner:
    """Return a runner, each of whose calls visits every input shape."""
    period = program_run.program.period

    def call() -> None:
        for _ in range(period):
            program_run.step()

    return Runner(call, period)
