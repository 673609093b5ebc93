"""What a step came to, over all ranks: one small all-reduce per optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from service.training.timeline import NO_LOAD, Load, bubble_fraction

LOSS, SQUARED_NORM, STOP, UNSAVED, BUSY = range(5)
PER_RANK = 5
BAD_GRADIENT, BAD_LOSS = 1.0, 2.0


class NonFiniteError(RuntimeError):
    """The loss or the gradient is infinite or not a number; training on would destroy the weights."""


@dataclass(frozen=True)
class StepTotals:
    """Values of one step that are equal on every rank; ``memory_gib`` is the largest peak of any.

    ``unsaved`` says that a rank could not write a checkpoint. ``bubble_fraction`` is of the newest pipeline run that
    every device has finished, if there is one.
    """

    loss: float
    grad_norm: float
    stop: bool
    unsaved: bool
    memory_gib: float
    bubble_fraction: float | None


class Tally:
    """Adds up one step's numbers over the mesh without making the host wait for the device.

    The vector holds the loss, the squared gradient norm, how many ranks were asked to stop and how many could not
    write a checkpoint, the seconds in which devices computed, and for each rank three slots: whether its own numbers
    were finite, its peak memory in GiB, the seconds of its pipeline run.
    """

    def __init__(
        self,
        local_loss: Tensor,
        squared_norm: Tensor,
        *,
        stop: bool,
        memory_gib: float,
        unsaved: bool = False,
        load: Load = NO_LOAD,
    ) -> None:
        world, rank = _place()
        device = squared_norm.device
        vector = torch.zeros(PER_RANK + 3 * world, dtype=torch.float64)
        vector[STOP], vector[PER_RANK + world + rank] = float(stop), memory_gib
        vector[UNSAVED] = float(unsaved)
        vector[BUSY], vector[PER_RANK + 2 * world + rank] = load.busy, load.window
        vector = vector.to(device, non_blocking=True)
        loss = local_loss.detach().double()
        vector[LOSS], vector[SQUARED_NORM] = loss, squared_norm
        vector[PER_RANK + rank] = BAD_LOSS * ~loss.isfinite() + BAD_GRADIENT * ~squared_norm.isfinite()
        if world > 1:
            dist.all_reduce(vector)
        self.grad_norm = vector[SQUARED_NORM].sqrt()
        self._host = vector if device.type == "cpu" else _to_host(vector)
        self._copied = None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()

    def read(self, step: int) -> StepTotals:
        """Wait for the numbers; raises :class:`NonFiniteError` naming ``step`` and the rank where they went wrong."""
        if self._copied is not None:
            self._copied.synchronize()
        values = self._host.tolist()
        world, _ = _place()
        marks, memory, windows = (values[PER_RANK + part * world :][:world] for part in range(3))
        _check_finite(marks, step)
        measured = min(windows) > 0
        return StepTotals(
            loss=values[LOSS],
            grad_norm=math.sqrt(values[SQUARED_NORM]),
            stop=values[STOP] > 0,
            unsaved=values[UNSAVED] > 0,
            memory_gib=max(memory),
            bubble_fraction=bubble_fraction(values[BUSY], world, max(windows)) if measured else None,
        )


def _to_host(vector: Tensor) -> Tensor:
    """A copy on its way: only to pinned memory does the host not wait for all that the device has still to do."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)


def _check_finite(marks: list[float], step: int) -> None:
    worst = max(marks)
    if worst == 0:
        return
    what = "loss" if worst >= BAD_LOSS else "gradient norm"
    raise NonFiniteError(
        f"the {what} is not finite on rank {marks.index(worst)} at step {step}; "
        "lower the learning rate or look at the data, then retry from the last checkpoint"
    )


def _place() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
