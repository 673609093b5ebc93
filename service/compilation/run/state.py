"""Saves and restores the state of a program's modules and optimizers: what becomes of it, and how it comes back to
where it began.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from service.compilation.run.program_run import ProgramRun, named_in
from service.compilation.run.sampling import Key, kept, local_part


def state_of(program_run: ProgramRun) -> dict[Key, Tensor]:
    """Return what is compared of the trainable parameters and of the buffers."""
    buffers = named_in(program_run.parts.modules, lambda module: module.named_buffers())
    return {
        key: value
        for kind, members in (("parameter", program_run.trainable), ("buffer", buffers))
        for name, member in members.items()
        for key, value in kept(kind, name, member)
    }


@dataclass(frozen=True)
class Snapshot:
    """Parameters, buffers and optimizers as they were.

    Values are on the CPU, where they add nothing to peak memory; pinned, as they go back before every iteration.
    """

    values: tuple[tuple[Tensor, Tensor], ...]
    optimizers: tuple[tuple[Optimizer, dict[str, Any]], ...]

    @staticmethod
    def of(program_run: ProgramRun) -> Snapshot:
        modules = program_run.parts.modules.values()
        members = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
        return Snapshot(
            tuple((each, _on_host(local_part(each))) for each in members.values()),
            tuple((each, deepcopy(each.state_dict())) for each in program_run.parts.optimizers),
        )

    def restore(self) -> None:
        """Restore in place: compiled code knows tensors by where they are."""
        with torch.no_grad():
            for value, before in self.values:
                local_part(value).copy_(before, non_blocking=True)
        for optimizer, held in self.optimizers:
            optimizer.load_state_dict(deepcopy(held))


def _on_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value)
