"""One forward, one backward after a warm-up (PipeDream-Flush, Narayanan et al., 2021)."""

from __future__ import annotations

from service.schedules.lowering import lower
from service.schedules.schedule import Instruction, Op, Schedule, check_sizes, loop


def one_f_one_b(pp: int, virtual_stages: int, micro_batches: int) -> Schedule:
    """One stage per rank. Idle as long as GPipe, but rank r keeps the activations of at most pp - r micro-batches."""
    check_sizes("1f1b", pp, virtual_stages, micro_batches, only=1)
    orders = [_order(rank, min(pp - rank - 1, micro_batches), micro_batches) for rank in range(pp)]
    return lower("1f1b", micro_batches, loop(pp, 1), orders)


def _order(stage: int, warm_up: int, micro_batches: int) -> list[Instruction]:
    order = [Instruction(Op.FORWARD, stage, each) for each in range(warm_up)]
    for each in range(micro_batches):
        if each + warm_up < micro_batches:
            order.append(Instruction(Op.FORWARD, stage, each + warm_up))
        order.append(Instruction(Op.BACKWARD, stage, each))
    return order
