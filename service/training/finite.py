"""Numbers that are infinite or none: found before they are published, and told in a user's words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from service.training.gradients import local

ADVICE = (
    "lower the learning rate and go on from the last checkpoint by a new job with resume: {job: ID}, or correct the "
    "data and start from its weights by model: {job: ID}"
)


class NonFiniteError(RuntimeError):
    """The loss, the gradient, the weights or an evaluation is infinite or not a number: training on is of no use."""


@torch.no_grad()
def check_weights(parameters: Sequence[Tensor], step: int, device: torch.device) -> None:
    """Raise :class:`NonFiniteError` on every rank if the weights of one are not finite after ``step``; all call it."""
    own = [part for parameter in parameters if (part := local(parameter.detach())).numel()]
    largest = torch.stack(torch._foreach_norm(own, math.inf)) if own else torch.zeros(1, device=device)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    broken = torch.zeros(world, device=device)
    broken[rank] = (~largest.isfinite()).any()
    if world > 1:
        dist.all_reduce(broken)
    if ranks := broken.nonzero().flatten().tolist():
        raise NonFiniteError(f"the weights are not finite on rank {ranks[0]} after the update of step {step}; {ADVICE}")


def check_evaluation(metrics: Mapping[str, float], step: int) -> None:
    """Raise :class:`NonFiniteError` for an evaluation that gave no number; it is the same on every rank."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{name} is {value} in the evaluation after step {step}: look at the test split for values that are "
                f"not finite; if there are none, {ADVICE}"
            )


@contextmanager
def explained_overflow(step: int, rate: float) -> Iterator[None]:
    """Raise :class:`NonFiniteError` for an update whose factors no float holds, which torch refuses in words of its own
    where it computes on a CPU.
    """
    try:
        yield
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        raise NonFiniteError(
            f"the update of step {step} is beyond float32 with a learning rate of {rate:g}; {ADVICE}"
        ) from error
