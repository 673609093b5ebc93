"""1F1B with the backward split, so that weight gradients fill idle time (ZB-H1, Qi et al., 2023)."""

from __future__ import annotations

from service.schedules.schedule import Generator, Instruction, Op


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    return [_order(rank, min(pp - rank - 1, micro_batches), micro_batches) for rank in range(pp)]


def _order(rank: int, warm_up: int, micro_batches: int) -> list[Instruction]:
    order = [Instruction(Op.FORWARD, rank, each) for each in range(warm_up)]
    for each in range(micro_batches):
        if each + warm_up < micro_batches:
            order.append(Instruction(Op.FORWARD, rank, each + warm_up))
        order.append(Instruction(Op.BACKWARD_INPUT, rank, each))
        if each >= rank:
            order.append(Instruction(Op.BACKWARD_WEIGHT, rank, each - rank))
    left = range(max(micro_batches - rank, 0), micro_batches)
    return order + [Instruction(Op.BACKWARD_WEIGHT, rank, each) for each in left]


ZERO_BUBBLE = Generator("zero_bubble", _orders)
"""A third of 1F1B's bubble, for activations of at most pp micro-batches on every rank.

Rank r has r fewer micro-batches in its warm-up than the first rank, and defers the weight gradients of as many.
"""
