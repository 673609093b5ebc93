"""Saves and restores the state of a program's modules and optimizers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from service.compilation.run.program_run import ProgramRun, named_in
from service.compilation.run.sampling import Key, kept, local_part
from service.parallel.containers import tensors_in

_VARIED = 4
_MEMBERS = 10**6
"""More than any program has parameters."""


def state_of(program_run: ProgramRun) -> dict[Key, Tensor]:
    """Return the trainable parameters and buffers in the form in which they are compared."""
    buffers = named_in(program_run.parts.modules, lambda module: module.named_buffers())
    return {
        key: value
        for kind, members in (("parameter", program_run.trainable), ("buffer", buffers))
        for name, member in members.items()
        for key, value in kept(kind, name, member)
    }


@dataclass(frozen=True)
class Snapshot:
    """Parameters, buffers and optimizers as they were, in the order in which every build of a program has them.

    On the host, where they add nothing to peak memory.
    """

    values: tuple[Tensor, ...]
    optimizers: tuple[dict[str, Any], ...]

    @staticmethod
    def of(program_run: ProgramRun) -> Snapshot:
        return Snapshot(
            tuple(local_part(each).to("cpu", copy=True) for each in program_run.members),
            tuple(_on_host(each.state_dict()) for each in program_run.parts.optimizers),
        )

    @property
    def size(self) -> int:
        """Return the bytes of parameters, buffers and the state of optimizers."""
        return sum(each.nbytes for each in (*self.values, *tensors_in(self.optimizers)))

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
    return before.flatten()[torch.randperm(before.numel(), generator=generator)].view_as(before)


def _nudged(value: Tensor, units: int, index: int) -> Tensor:
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(units * _MEMBERS + index)
    signs = torch.randint(2, value.shape, generator=generator).mul_(2).sub_(1)
    return value * (1 + signs.to(value.dtype) * units * torch.finfo(value.dtype).eps)


def _on_host(state: Any) -> Any:
    """Return a copy of an optimizer's state, with its tensors on the host."""
    if isinstance(state, Tensor):
        return state.detach().clone() if state.device.type == "cpu" else state.detach().cpu()
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_on_host(value) for value in state)
    return deepcopy(state)
