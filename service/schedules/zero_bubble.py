"""1F1B with the backward split, so that weight gradients fill idle time (ZB-H1, Qi et al., 2023)."""

from __future__ import annotations

from service.schedules.one_f_one_b import alternating
from service.schedules.schedule import Generator, Instruction, Op


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    return [_order(rank, pp, micro_batches) for rank in range(pp)]


def _order(rank: int, pp: int, micro_batches: int) -> list[Instruction]:
    order = []
    for each in alternating(rank, pp, micro_batches, Op.BACKWARD_INPUT):
        order.append(each)
        if each.op is Op.BACKWARD_INPUT and each.micro_batch >= rank:
            order.append(Instruction(Op.BACKWARD_WEIGHT, rank, each.micro_batch - rank))
    left = range(max(micro_batches - rank, 0), micro_batches)
    return order + [Instruction(Op.BACKWARD_WEIGHT, rank, each) for each in left]


ZERO_BUBBLE = Generator("zero_bubble", _orders)
"""A third of 1F1B's bubble, for activations of at most pp micro-batches on every rank.

Rank r has r fewer micro-batches in its warm-up than the first rank, and defers the weight gradients of as many.
"""
