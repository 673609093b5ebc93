"""One forward, one backward over several stages per rank (Narayanan et al., 2021, Megatron-LM)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from service.schedules.schedule import Generator, Instruction, Op


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    """Take a group of micro-batches through one of a rank's stages, then through the next.

    Megatron's groups have pp micro-batches each; here their sizes differ by at most one, which keeps the bubble small
    where pp does not divide.
    """
    groups = list(_groups(micro_batches, max(1, micro_batches // pp)))
    return [_order(rank, pp, virtual_stages, groups) for rank in range(pp)]


def _groups(micro_batches: int, count: int) -> Iterator[range]:
    """Return consecutive groups, larger ones first."""
    share, extra = divmod(micro_batches, count)
    start = 0
    for index in range(count):
        size = share + (index < extra)
        yield range(start, start + size)
        start += size


def _order(rank: int, pp: int, virtual_stages: int, groups: Sequence[range]) -> list[Instruction]:
    chunks = range(virtual_stages)
    forwards = [
        Instruction(Op.FORWARD, chunk * pp + rank, each) for group in groups for chunk in chunks for each in group
    ]
    backwards = [
        Instruction(Op.BACKWARD, chunk * pp + rank, each)
        for group in groups
        for chunk in chunks[::-1]
        for each in group
    ]
    warm_up = 2 * (pp - rank - 1) + (virtual_stages - 1) * len(groups[0])
    steady = zip_longest(forwards[warm_up:], backwards)
    return forwards[:warm_up] + [each for pair in steady for each in pair if each is not None]


INTERLEAVED = Generator("interleaved", _orders, stages_per_rank=2, takes_any_stages=True)
"""Has the bubble of 1F1B divided by ``virtual_stages``, for any number of micro-batches from ``pp`` on."""
