"""Keeps the two copies of tied parameters equal that the first and the last stage of a pipeline have.

As in Megatron-LM (Shoeybi et al., 2019): both copies start equal, and both get the sum of both gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from service.models.tied import tied_names
from service.parallel.collectives import resolve
from service.parallel.mesh import Mesh, group_of_stages
from service.schedules.schedule import Schedule
from service.training.gradients import local


@dataclass(frozen=True)
class TiedStages:
    """What this rank has of tied parameters: the ``originals`` on the first stage, the ``copies`` on the last, in one
    order.

    Each is empty where the rank has not that stage. ``group`` spans the ranks of both stages; it is empty where they
    are one.
    """

    originals: tuple[nn.Parameter, ...] = ()
    copies: tuple[nn.Parameter, ...] = ()
    group: str = ""

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters without the copies: each of the whole model's once."""
        copies = set(map(id, self.copies))
        return [parameter for parameter in parameters if id(parameter) not in copies]

    def sum_gradients(self) -> None:
        """Give original and copy the sum of their gradients; the ranks of both stages call it together."""
        if self.group:
            for parameter in (*self.originals, *self.copies):
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=resolve(self.group))
            return
        for original, copy in zip(self.originals, self.copies, strict=True):
            if original.grad is not None and copy.grad is not None:
                own, other = local(original.grad), local(copy.grad)
                other.copy_(own.add_(other))

    @torch.no_grad()
    def take_up(self, optimizer: AdamW) -> None:
        """Give copies what was loaded into originals, with their moments, where a rank has both: it loads one only."""
        if self.group:
            return
        for original, copy in zip(self.originals, self.copies, strict=True):
            local(copy.detach()).copy_(local(original.detach()))
            for name, value in optimizer.state[copy].items():
                _copy(value, optimizer.state[original][name])


def _copy(target: Tensor, source: Tensor) -> None:
    local(target).copy_(local(source))


def find_tied(stages: Mapping[int, nn.Module], schedule: Schedule | None, mesh: Mesh) -> TiedStages:
    """Return the tied parameters among this rank's stages; every rank calls it, as it may make a group."""
    if schedule is None:
        return TiedStages()
    names = tied_names(next(iter(stages.values())))
    if not names:
        return TiedStages()
    first, last = schedule.owners[0], schedule.owners[-1]
    return TiedStages(
        originals=_named(stages.get(0), names.values()),
        copies=_named(stages.get(len(schedule.owners) - 1), names.keys()),
        group=group_of_stages(mesh, first, last) if first != last else "",
    )


def _named(stage: nn.Module | None, names: Iterable[str]) -> tuple[nn.Parameter, ...]:
    return () if stage is None else tuple(stage.get_parameter(name) for name in names)
