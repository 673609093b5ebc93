"""Builds the parts of a program before its first step, in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from service.jobs.plugins import ProgramConfig
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import Phase
from service.jobs.spec.run import RunSpec
from service.jobs.spec.train import TrainSpec
from service.models.compiled import COMPILE_MODES, apply_compile
from service.models.parallelize import Fingerprint
from service.models.program import Parts, Program, Site, build_parts, make
from service.models.randomness import seed_all
from service.parallel.boundary import StepBoundary
from service.parallel.mesh import Mesh
from service.parallel.mesh import build as build_mesh
from service.training.gate import allowed_modes, checked_calls, load_caches, lowest_mode
from service.training.journal import compiled
from service.training.programs.calls import CheckedCalls, Pattern
from service.training.programs.failures import Blame, LackingError
from service.training.usage import UsageMetrics


@dataclass(frozen=True)
class PreparedProgram:
    """Holds a program on this rank, with its parts compiled as far as its gate allows."""

    config: ProgramConfig
    context: RunContext
    device: torch.device
    mesh: Mesh
    program: Program
    origin: Fingerprint
    parts: Parts
    boundary: StepBoundary
    compile_modes: dict[Phase, str]
    calls: CheckedCalls
    usage: UsageMetrics
    blame: Blame
    random_seed: int

    def seed(self, what: str, step: int) -> None:
        """Seed what draws numbers, as a model's training does."""
        seed_all(self.random_seed, what, step, self.mesh.pp.rank, self.mesh.dp.rank)

    @property
    def described(self) -> str:
        """Return a line about the program."""
        package = self.origin["program.package"]
        return f"{self.config.name} of {package}, {self.parameters:,} parameters{compiled(self.compile_modes)}"

    @property
    def parameters(self) -> int:
        """Return the number of elements of its parameters."""
        return sum(value.numel() for value in self.parts.members().values() if isinstance(value, nn.Parameter))

    def facts(self) -> dict[str, Any]:
        """Return what a job's result says of the program."""
        facts: dict[str, Any] = {"program": self.config.name, "parameters": self.parameters}
        modes = self.compile_modes
        return {**facts, "compiled": modes, "eager": self.calls.unlike} if modes else facts


FIRST = "first"
"""The argument by which ``train`` learns how many steps were done before."""


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a function has an argument of this name."""
    return argument in inspect.signature(function).parameters


def prepare_program(
    spec: TrainSpec | RunSpec, context: RunContext, device: torch.device, check: Callable[[Program], None]
) -> PreparedProgram:
    """Build and compile the program of ``spec``; every rank calls this, and nothing is written. ``check`` sees the
    program before it is built.
    """
    config = spec.program
    assert config is not None
    seed_all(spec.seed, "data")  # alike on all ranks
    mesh = build_mesh(spec.parallel, device.type)
    blame = Blame(config.name, device)
    with blame.of("its maker"):
        program, origin = make(config, spec.parallel, Site(device, mesh, spec.seed, context.data))
    check(program)
    modes = allowed_modes(spec.compile, [origin], context.data)
    patterns = {phase: Pattern.of(rows) for phase, rows in checked_calls(spec.compile, modes, context.data).items()}
    load_caches(spec.compile, modes, context)
    context.report.phase("preparing")
    with blame.of(f"build({torch.float32})"):
        parts = build_parts(program, torch.float32)
    boundary = StepBoundary(parts.modules, kept=parts.kept)
    calls = CheckedCalls(boundary, patterns, _teller(spec, context))
    if modes:
        _compile(parts, lowest_mode(modes), calls)
    usage = UsageMetrics(spec.counters, context, boundary, tells=context.rank == 0)
    return PreparedProgram(
        config, context, device, mesh, program, origin, parts, boundary, modes, calls, usage, blame, spec.seed
    )


def prepare_training(spec: TrainSpec, context: RunContext, device: torch.device) -> PreparedProgram:
    """Prepare a program that can do what its training asks for."""
    prepared = prepare_program(spec, context, device, partial(_check_able, spec))
    _check_state(spec, prepared.parts)
    return prepared


def _going_on(spec: TrainSpec) -> tuple[str, object] | None:
    """Return a field that asks for checkpoints, and its value, if one does."""
    asked = {
        "checkpoint.every": spec.checkpoint.every,
        "resume.job": spec.resume and spec.resume.job,
        "preemptible": spec.preemptible or None,
    }
    return next(((field, value) for field, value in asked.items() if value is not None), None)


def _check_able(spec: TrainSpec, program: Program) -> None:
    """Raise :class:`LackingError` naming the field for what the program cannot do."""
    assert spec.program is not None
    name, asked = spec.program.name, _going_on(spec)
    if asked is not None and not takes(program.train, FIRST):
        raise LackingError(
            f"{asked[0]}={asked[1]}: program {name!r} cannot go on from a step; expected "
            f"train(parts, boundary, {FIRST}=0), whose {FIRST} is the number of steps done before"
        )
    if spec.evaluate.every is not None and not hasattr(program, "evaluate"):
        raise LackingError(
            f"evaluate.every={spec.evaluate.every}: program {name!r} has no evaluation; expected "
            "evaluate(parts, boundary), which returns numbers by name"
        )


def _check_state(spec: TrainSpec, parts: Parts) -> None:
    """Raise :class:`LackingError` if checkpoints are asked for, and there is nothing to be in them."""
    assert spec.program is not None
    if (asked := _going_on(spec)) is not None and not parts.members():
        raise LackingError(
            f"{asked[0]}={asked[1]}: program {spec.program.name!r} has no state to checkpoint; its modules "
            f"{', '.join(parts.modules)} have neither parameters nor buffers"
        )


def _compile(parts: Parts, mode: str, calls: CheckedCalls) -> None:
    """Compile the program's modules in place, and watch their calls for good."""
    units, chosen = parts.units(), COMPILE_MODES[mode]
    for name in parts.compiled:
        apply_compile(parts.modules[name], chosen.backend, chosen.mode)
    for name, unit in units.items():
        calls.watch(name, unit)


def _teller(spec: TrainSpec | RunSpec, context: RunContext) -> Callable[[Phase, str], None]:
    def tell(phase: Phase, why: str) -> None:
        context.report.log(f"rank {context.rank}: {phase} goes on in eager: {why} (gate of {spec.compile.gate})")

    return tell
