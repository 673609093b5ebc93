"""One forward, one backward after a warm-up (PipeDream-Flush, Narayanan et al., 2021)."""

from __future__ import annotations

from service.schedules.schedule import Generator, Instruction, Op


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    return [_order(rank, min(pp - rank - 1, micro_batches), micro_batches) for rank in range(pp)]


def _order(stage: int, warm_up: int, micro_batches: int) -> list[Instruction]:
    order = [Instruction(Op.FORWARD, stage, each) for each in range(warm_up)]
    for each in range(micro_batches):
        if each + warm_up < micro_batches:
            order.append(Instruction(Op.FORWARD, stage, each + warm_up))
        order.append(Instruction(Op.BACKWARD, stage, each))
    return order


ONE_F_ONE_B = Generator("1f1b", _orders)
"""Idle as long as GPipe, but rank r keeps the activations of at most pp - r micro-batches."""
