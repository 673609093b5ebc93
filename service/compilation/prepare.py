"""Prepares a check: starts code generation, builds the program, and plans its runs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.compilation.host_fault import HostFaultError, describe, raise_host_fault
from service.compilation.instruments.toolchain import Toolchain
from service.compilation.program import Program
from service.compilation.program.target import target_of
from service.compilation.ranks.group import slowest
from service.compilation.run.run_plan import RunPlan, plan_run
from service.compilation.rungs import Rung
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec
from service.models.reference import read_unchecked
from service.parallel import distributed


@dataclass(frozen=True)
class Prepared:
    """A program that is ready to be checked."""

    program: Program
    plan: RunPlan
    about: Any
    """What the report says of both; a process of its own sends it to the one that started it."""
    toolchain: Toolchain | None = None
    """What to start before a rung generates code; ``None`` if that has been done."""

    def start(self, rungs: Sequence[Rung]) -> float | None:
        """Start what these rungs need; return the seconds of the one-off start of code generation, if that was."""
        seconds = None if self.toolchain is None else start_toolchain(self.toolchain, rungs)
        gc.collect()
        gc.freeze()  # imported objects hold no results, and searching them takes long
        return seconds


def prepare_alone(spec: CompileSpec, context: RunContext, *, begins: bool = False) -> Prepared:
    """Prepare the program as a process of its own climbs it, without other ranks; if it ``begins``, code generation
    starts meanwhile. Whether the weights are whole, the process that started the check finds out.
    """
    device = distributed.start_alone(context.device_type)
    toolchain = Toolchain(device)
    if begins:
        toolchain.begin()
    target = target_of(spec, context, device, read_unchecked)
    plan = replace(plan_run(target.program, spec.steps, spec.permitted, slowest), fullgraph=spec.fullgraph)
    return Prepared(target.program, plan, target.subject, toolchain)


def start_toolchain(toolchain: Toolchain, rungs: Sequence[Rung]) -> float | None:
    """Return the seconds of the one-off start of code generation; ``None`` if no rung generates code.

    Raises :class:`HostFaultError` if it does not start: no program can be the cause.
    """
    if not any(rung.generates_code for rung in rungs):
        return None
    try:
        return toolchain.start()
    except Exception as error:
        raise_host_fault(error)
        raise HostFaultError(f"code generation does not start on this host: {describe(error)}") from error
