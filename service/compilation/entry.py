"""Starts a compile-check job: forks its processes before it imports anything. An import of PyTorch's compilers
may start CUDA, and a process forked after that cannot use it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from service.compilation.forks import CORES, PROCESSES, Forks, Seat, can_fork
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec

_PROVING = 1
"""One process proves the detectors."""


def run(spec: CompileSpec, context: RunContext) -> dict[str, Any] | None:
    """Run the job like :func:`service.compilation.job.run`; one rank on a GPU has processes that climb for it."""
    apart = context.world_size == 1 and context.device_type == "cuda" and can_fork()
    forks = Forks.ready(lambda seat: _serve(spec, context, seat), _eager(spec), _spare(spec)) if apart else None
    try:
        result: dict[str, Any] | None = importlib.import_module("service.compilation.job").run(spec, context, forks)
    finally:
        if forks is not None:
            forks.end()
    return result


def _eager(spec: CompileSpec) -> int:
    most = sum(PROCESSES[0][phase] for phase in spec.phases)
    return _PROVING + min(most, max(1, len(os.sched_getaffinity(0)) // CORES))


def _spare(spec: CompileSpec) -> int:
    """Return how many more processes may be needed: one repeats trials, others go on after a rung that ended one."""
    return 1 + len(spec.modes) * len(spec.phases)


def _serve(spec: CompileSpec, context: RunContext, seat: Seat) -> None:
    """Import the modules of a task if one is sure to come, then wait for it.

    The processes share the cores: with as many threads as there are cores in each, every operation on the host waits
    for threads of the others.
    """
    if seat.eager:
        importlib.import_module("service.compilation.job")
    task = seat.tasks.recv()
    importlib.import_module("torch").set_num_threads(max(1, len(os.sched_getaffinity(0)) // _eager(spec)))
    importlib.import_module("service.compilation.job").serve(spec, context, seat, task)
