"""One forward, one backward after a warm-up (PipeDream-Flush, Narayanan et al., 2021).

With the backward split, weight gradients fill idle time (ZB-H1, Qi et al., 2023).
"""

from __future__ import annotations

from service.schedules.schedule import Generator, Instruction, Op


def _order(rank: int, pp: int, micro_batches: int, backward: Op = Op.BACKWARD) -> list[Instruction]:
    warm_up = min(pp - rank - 1, micro_batches)
    order = [Instruction(Op.FORWARD, rank, each) for each in range(warm_up)]
    for each in range(micro_batches):
        if each + warm_up < micro_batches:
            order.append(Instruction(Op.FORWARD, rank, each + warm_up))
        order.append(Instruction(backward, rank, each))
    return order


def _split_order(rank: int, pp: int, micro_batches: int) -> list[Instruction]:
    order = []
    for each in _order(rank, pp, micro_batches, Op.BACKWARD_INPUT):
        order.append(each)
        if each.op is Op.BACKWARD_INPUT and each.micro_batch >= rank:
            order.append(Instruction(Op.BACKWARD_WEIGHT, rank, each.micro_batch - rank))
    left = range(max(micro_batches - rank, 0), micro_batches)
    return order + [Instruction(Op.BACKWARD_WEIGHT, rank, each) for each in left]


ONE_F_ONE_B = Generator("1f1b", lambda pp, _, micro_batches: [_order(rank, pp, micro_batches) for rank in range(pp)])
"""Idle as long as GPipe, but rank r keeps the activations of at most pp - r micro-batches."""
ZERO_BUBBLE = Generator(
    "zero_bubble", lambda pp, _, micro_batches: [_split_order(rank, pp, micro_batches) for rank in range(pp)]
)
"""A third of 1F1B's bubble, for activations of at most pp micro-batches on every rank.

Rank r has r fewer micro-batches in its warm-up than the first rank, and defers the weight gradients of as many.
"""
