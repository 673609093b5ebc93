"""All forwards, then all backwards (Huang et al., 2019)."""

from __future__ import annotations

from service.schedules.lowering import lower
from service.schedules.schedule import Instruction, Op, Schedule, check_sizes, loop


def gpipe(pp: int, virtual_stages: int, micro_batches: int) -> Schedule:
    """One stage per rank. Keeps the activations of every micro-batch; idle for (pp - 1)/(m + pp - 1) of the time."""
    check_sizes("gpipe", pp, virtual_stages, micro_batches, only=1)
    every = range(micro_batches)
    orders = [[Instruction(op, rank, each) for op in (Op.FORWARD, Op.BACKWARD) for each in every] for rank in range(pp)]
    return lower("gpipe", micro_batches, loop(pp, 1), orders)
