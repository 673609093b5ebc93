"""Builds a program in one phase, ready to run, and records the results of one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from service.compilation.instruments.backward import watched_backwards
from service.compilation.program import Parts, Program, Step
from service.compilation.run.sampling import Key, copies_to_compare, is_equal, local_part
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Phase
from service.models.compiled import apply_compile, compile_unit
from service.models.program import Steps, build_parts
from service.models.randomness import drawn, seed_all
from service.parallel.boundary import CallSite, StepBoundary


@dataclass(frozen=True)
class StepRecord:
    """The results of one step, as copies on the host of this rank's tensors or parts of them (``sampling``)."""

    tensors: dict[Key, Tensor]
    """By ``(kind, name)``; the kinds are ``loss``, ``output``, ``input`` and ``gradient``, and ``buffer`` and ``frozen
    parameter`` after the last step of an input shape; `` (whole)`` follows the kind of signed sums.
    """
    missing: frozenset[str]
    """Trainable parameters that got no gradient."""
    overwritten: frozenset[str]
    """Inputs that the step updated in place."""
    compiled_backward: int
    """How many compiled nodes its backwards ran."""
    generators: str
    """The state in which it left the generators of random numbers, of torch, NumPy and Python."""
    drew: bool
    """Whether it drew random numbers."""


@dataclass(frozen=True)
class BuiltProgram:
    """A program's parts in one phase, compiled or not, with its steps under way."""

    program: Program
    phase: Phase
    parts: Parts
    boundary: StepBoundary
    steps: Steps
    trainable: Mapping[str, Tensor]
    """The parameters of its optimizers, by name."""
    frozen: Mapping[str, Tensor]
    """The other parameters of its modules."""
    units: Mapping[str, nn.Module]
    """The compiled modules, by name; none in an uncompiled program."""
    copied: frozenset[str]
    """The units whose results the boundary copies."""
    members: tuple[Tensor, ...]
    """All parameters and buffers, each once, as they were before the first step; those of optimizers alone, too."""

    def restarted(self) -> BuiltProgram:
        """Return the same parts, from their first step on."""
        boundary = StepBoundary(self.parts.modules, kept=self.parts.kept)
        return replace(self, boundary=boundary, steps=_steps(self.program, self.phase, self.parts, boundary))

    def step(self) -> Step:
        """Run the next step."""
        return next(self.steps)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers of all modules by name."""
        return named_in(self.parts.modules, lambda module: module.named_buffers())

    @property
    def unsharded(self) -> frozenset[str]:
        """Return the trainable parameters that FSDP has not put back among the ranks."""
        now = named_in(self.parts.modules, lambda module: module.named_parameters())
        sharded = {name for name, value in self.trainable.items() if isinstance(value, DTensor)}
        return frozenset(name for name, value in now.items() if name in sharded and not isinstance(value, DTensor))


def build(program: Program, phase: Phase, rung: Rung | None = None, dtype: torch.dtype = torch.float32) -> BuiltProgram:
    """Return new parts, compiled for ``rung`` if given, before their first step."""
    parts = build_parts(program, dtype)
    if rung is None:
        return _begin(program, phase, parts, {})
    units = parts.units()
    for name in parts.compiled:
        apply_compile(parts.modules[name], rung.backend, rung.mode)
    return _begin(program, phase, parts, units)


def build_only(program: Program, phase: Phase, rung: Rung, unit: str) -> BuiltProgram:
    """Return new parts with only ``unit`` compiled: a module's name in the program, and its path in that."""
    parts = build_parts(program, torch.float32)
    name, _, path = unit.partition(".")
    module = parts.modules[name].get_submodule(path)
    compile_unit(module, rung.backend, rung.mode)
    return _begin(program, phase, parts, {unit: module})


def _begin(program: Program, phase: Phase, parts: Parts, units: Mapping[str, nn.Module]) -> BuiltProgram:
    boundary = StepBoundary(parts.modules, kept=parts.kept)
    held = {id(each): each for part in parts.modules.values() for each in (*part.parameters(), *part.buffers())}
    trainable, frozen = _parameters(parts)
    members = tuple((held | {id(each): each for each in trainable.values()}).values())
    steps = _steps(program, phase, parts, boundary)
    copied = frozenset(name for name in units if name.split(".")[0] in parts.kept)
    return BuiltProgram(program, phase, parts, boundary, steps, trainable, frozen, units, copied, members)


def record_step(
    built: BuiltProgram, seed: int, handed_over: Callable[[Any, CallSite], None] = lambda results, site: None
) -> StepRecord:
    """Run the next step with this seed of the random numbers, and return its results.

    ``handed_over`` is called with those that the program yields, and where.
    """
    seed_all(seed)
    device = built.program.device
    fresh = drawn(device)
    gradients: dict[Key, Tensor] = {}
    with ExitStack() as stack:
        backwards = stack.enter_context(watched_backwards())
        for optimizer in built.parts.optimizers:
            hook = optimizer.register_step_pre_hook(partial(_collect_gradients, built.trainable, gradients))
            stack.callback(hook.remove)
        step = built.step()
    generators = drawn(device)
    handed_over((step.losses, step.outputs), built.steps.site)
    left = {name: after for name, (_, after) in step.inputs.items()}
    by_kind = {"loss": step.losses, "output": step.outputs, "input": left}
    tensors = copies_to_compare((kind, name, value) for kind, of in by_kind.items() for name, value in of.items())
    missing = {name for name in built.trainable if ("gradient", name) not in gradients}
    return StepRecord(
        tensors | gradients,
        frozenset(missing if built.phase == "train" else ()),
        frozenset(name for name, pair in step.inputs.items() if _is_changed(*pair)),
        sum(backwards),
        generators,
        drew=generators != fresh,
    )


def _is_changed(before: Tensor, after: Tensor) -> bool:
    one, other = local_part(before), local_part(after)
    if not one.is_nested and one.layout is torch.strided:
        return not is_equal(one, other)
    copies = [copies_to_compare([("input", "", each)]) for each in (one, other)]  # torch.equal takes no others
    return copies[0].keys() != copies[1].keys() or not all(map(torch.equal, copies[0].values(), copies[1].values()))


def _steps(program: Program, phase: Phase, parts: Parts, boundary: StepBoundary) -> Steps:
    return Steps(program.train(parts, boundary) if phase == "train" else program.inference(parts, boundary), phase)


def _parameters(parts: Parts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the optimizers' own parameters by name, in no module perhaps, and the modules' others; FSDP may replace
    those of the modules meanwhile.
    """
    named = named_in(parts.modules, lambda module: module.named_parameters())
    own = {id(each): each for optimizer in parts.optimizers for each in _parameters_of(optimizer)}
    trainable = {name: value for name, value in named.items() if id(value) in own}
    known = {id(value) for value in trainable.values()}
    loose = (value for value in own.values() if id(value) not in known)
    trainable |= {f"optimizer parameter {number}": value for number, value in enumerate(loose)}
    return trainable, {name: value for name, value in named.items() if id(value) not in own}


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (value for group in optimizer.param_groups for value in group["params"])


def named_in(modules: Mapping[str, nn.Module], members: Any) -> dict[str, Tensor]:
    """Return the members of all modules; their names begin with the module's if there are several."""
    prefix = "{0}.{1}" if len(modules) > 1 else "{1}"
    return {prefix.format(part, name): value for part, module in modules.items() for name, value in members(module)}


def _collect_gradients(
    trainable: Mapping[str, Tensor], gradients: dict[Key, Tensor], optimizer: Optimizer, *_: Any, **__: Any
) -> None:
    """Note the gradients with which ``optimizer`` is about to step."""
    own = frozenset(map(id, _parameters_of(optimizer)))
    mine = ((name, value.grad) for name, value in trainable.items() if id(value) in own)
    gradients.update(copies_to_compare(("gradient", name, gradient) for name, gradient in mine if gradient is not None))
