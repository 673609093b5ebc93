"""One forward, one backward after a warm-up (PipeDream-Flush, Narayanan et al., 2021)."""

from __future__ import annotations

from service.schedules.schedule import Generator, Instruction, Op


def alternating(stage: int, pp: int, micro_batches: int, backward: Op) -> list[Instruction]:
    """Return a rank's forwards, one for each of its ``backward`` instructions after a warm-up."""
    warm_up = min(pp - stage - 1, micro_batches)
    order = [Instruction(Op.FORWARD, stage, each) for each in range(warm_up)]
    for each in range(micro_batches):
        if each + warm_up < micro_batches:
            order.append(Instruction(Op.FORWARD, stage, each + warm_up))
        order.append(Instruction(backward, stage, each))
    return order


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    return [alternating(rank, pp, micro_batches, Op.BACKWARD) for rank in range(pp)]


ONE_F_ONE_B = Generator("1f1b", _orders)
"""Idle as long as GPipe, but rank r keeps the activations of at most pp - r micro-batches."""
