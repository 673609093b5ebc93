"""Saves and restores the state of a program's modules and optimizers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from service.compilation.run.built_program import ProgramRun, named_in
from service.compilation.run.sampling import Key, kept, local_part

HOST = torch.device("cpu")
_VARIED = 4
_MEMBERS = 10**6
"""More than any program has parameters."""


def state_of(program_run: ProgramRun) -> dict[Key, Tensor]:
    """Return the trainable parameters and buffers in the form in which they are compared."""
    buffers = named_in(program_run.parts.modules, lambda module: module.named_buffers())
    of_kinds = (("parameter", program_run.trainable), ("buffer", buffers))
    return kept((kind, name, member) for kind, members in of_kinds for name, member in members.items())


def size_of(program_run: ProgramRun) -> int:
    """Return the bytes of a program's parameters and buffers on this rank."""
    return sum(local_part(each).nbytes for each in program_run.members)


@dataclass(frozen=True)
class Snapshot:
    """Parameters, buffers and optimizers as they were, in the order in which every build of a program has them."""

    values: tuple[Tensor, ...]
    optimizers: tuple[dict[str, Any], ...]

    @staticmethod
    def of(program_run: ProgramRun, place: torch.device = HOST) -> Snapshot:
        """Copy the state to ``place``: the host, or the program's own device, from which restoring is much faster."""
        return Snapshot(
            tuple(local_part(each).to(place, copy=True) for each in program_run.members),
            tuple(_copied(each.state_dict(), place) for each in program_run.parts.optimizers),
        )

    def restore(self, program_run: ProgramRun) -> None:
        """Restore into any build of the program, in place: compiled code knows tensors by their addresses. A build in
        another precision takes the same numbers.
        """
        with torch.no_grad():
            for member, before in zip(program_run.members, self.values, strict=True):
                local_part(member).copy_(before)
        for optimizer, held in zip(program_run.parts.optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(deepcopy(held))

    def shuffled(self, program_run: ProgramRun, number: int) -> Snapshot:
        """Return the same with the elements of each parameter in another order, one for each ``number``."""
        generator = torch.Generator().manual_seed(number)
        pairs = zip(program_run.members, self.values, strict=True)
        return replace(self, values=tuple(_shuffled(each, before, generator) for each, before in pairs))

    def nudged(self, units: int) -> Snapshot:
        """Return the same with each number that is not a whole one moved by so many ``units`` in the last
        place, up or down at random.
        """
        return replace(self, values=tuple(_nudged(each, units, index) for index, each in enumerate(self.values)))

    def vary(self, program_run: ProgramRun, iteration: int) -> None:
        """Set the parameters to their first values times a number near 1, another one in each of ``_VARIED``
        iterations. Buffers stay as they are.
        """
        factor = 1 + (iteration % _VARIED) / 256
        with torch.no_grad():
            for member, before in zip(program_run.members, self.values, strict=True):
                if isinstance(member, nn.Parameter) and member.is_floating_point():
                    local_part(member).copy_(before * factor)


def _shuffled(member: Tensor, before: Tensor, generator: torch.Generator) -> Tensor:
    if not (isinstance(member, nn.Parameter) and before.is_floating_point()):
        return before
    order = torch.randperm(before.numel(), generator=generator).to(before.device)
    return before.flatten()[order].view_as(before)


def _nudged(value: Tensor, units: int, index: int) -> Tensor:
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(units * _MEMBERS + index)
    signs = torch.randint(2, value.shape, generator=generator).mul_(2).sub_(1).to(value.device, value.dtype)
    return value * (1 + signs * units * torch.finfo(value.dtype).eps)


def _copied(state: Any, place: torch.device) -> Any:
    """Return a copy of an optimizer's state, with its tensors in ``place``; those on the host, such as a count of
    steps, stay there.
    """
    if isinstance(state, Tensor):
        return state.detach().to(HOST if state.device == HOST else place, copy=True)
    if isinstance(state, dict):
        return {key: _copied(value, place) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value, place) for value in state)
    return deepcopy(state)
