"""All forwards, then all backwards (Huang et al., 2019)."""

from __future__ import annotations

from service.schedules.schedule import Generator, Instruction, Op


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    batches = range(micro_batches)
    return [
        [Instruction(op, rank, batch) for op in (Op.FORWARD, Op.BACKWARD) for batch in batches] for rank in range(pp)
    ]


GPIPE = Generator("gpipe", _orders)
"""Keeps the activations of every micro-batch; idle for (pp - 1)/(m + pp - 1) of the time."""
