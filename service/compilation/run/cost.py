"""Measures the costs of a rung: compiling from nothing, compiling from a filled cache, and each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from service.compilation.instruments.caches import empty_caches, forget_compiled, take_machine_code
from service.compilation.instruments.profile import Profile, record_profile
from service.compilation.program import Program
from service.compilation.run.built_program import BuiltProgram, build
from service.compilation.run.observation import RungCase, Timed
from service.compilation.run.timing import Race, RaceSettings, plan_race, summarise
from service.models.compiled import load_portable

log = logging.getLogger(__name__)
_PROFILED = 3
"""The fewest steps in a profile, which has whole passes over the input shapes."""


def pace(
    built: BuiltProgram,
    agree: Callable[[float], float],
    settings: RaceSettings,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    beside_eager: bool = True,
    profiles: Callable[[], None] = lambda: None,
) -> Timed:
    """Time the compiled ``built`` from its present step, before any input shape, beside the uncompiled
    program from its first step on; with ``beside_eager`` the latter is profiled, too. ``alone`` is entered meanwhile,
    and ``profiles`` called in between.
    """
    program = built.program
    eager, compiled = build(program, built.phase), built
    steps = -(-_PROFILED // program.period) * program.period
    with alone():
        raced = _race(_runner(eager), _runner(compiled), program.device, agree, settings)
        profiles()
        recorded = [_record(each, steps) for each in (compiled, eager)[: 1 + beside_eager]]
    own, *others = [read() if read else None for read in recorded]
    # Code that is not generated calls the operators that eager calls.
    share = _compiled_share(own, others[0] if others else own)
    return Timed(raced, own, others[0] if others else None, share)


def _compiled_share(own: Profile | None, eager: Profile | None) -> float | None:
    if own is None or eager is None or not eager.operators:
        return None
    return max(1 - own.uncompiled / eager.operators, 0.0)


@dataclass(frozen=True)
class _Runner:
    """A call that runs ``steps`` steps."""

    call: Callable[[], None]
    steps: int


def _race(
    eager: _Runner, compiled: _Runner, device: torch.device, agree: Callable[[float], float], settings: RaceSettings
) -> Race:
    """Time both in turns.

    ``agree`` makes one duration out of those of all ranks: unless all run equally often, their collectives do not
    match.
    """
    for runner in (eager, compiled):
        runner.call()
    slower = agree(max(_block(eager, 1, device), _block(compiled, 1, device)))
    repeats, rounds = plan_race(slower, settings)
    pairs = [(_block(eager, repeats, device), _block(compiled, repeats, device)) for _ in range(rounds)]
    return summarise([(first / eager.steps, second / compiled.steps) for first, second in pairs])


def _block(runner: _Runner, repeats: int, device: torch.device) -> float:
    """Return the seconds per call."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        runner.call()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(built: BuiltProgram, steps: int) -> Callable[[], Profile] | None:
    try:
        return record_profile(built.step, steps, built.program.device)
    except RuntimeError as error:  # such as when another profiler holds the device
        log.warning("no profile: %s", error)
        return None


def warm_seconds(program: Program, case: RungCase, step_s: float, cache: bytes | None, folder: Path) -> float:
    """Return the seconds to compile again for every shape with a filled cache.

    The rung starts in an empty folder with the portable ``cache`` and the machine code of ``folder``, as a job on this
    host does; without a portable cache it uses the folder's. A new process also pays for the import of PyTorch.
    """
    with empty_caches() if cache is not None else nullcontext(folder) as own:
        if own != folder:
            take_machine_code(folder, own)
        forget_compiled()
        runner = _runner(build(program, case.phase, case.rung).restarted())
        start = time.perf_counter()
        if cache is not None:
            load_portable(cache)
        runner.call()
        return max(time.perf_counter() - start - runner.steps * step_s, 0.0)


def _runner(built: BuiltProgram) -> _Runner:
    """Return a runner, each of whose calls visits every input shape."""
    period = built.program.period

    def call() -> None:
        for _ in range(period):
            built.step()

    return _Runner(call, period)
