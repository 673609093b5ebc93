"""One forward, one backward over several stages per rank (Narayanan et al., 2021, Megatron-LM)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from service.schedules.lowering import lower
from service.schedules.schedule import Instruction, Op, Schedule, check_sizes, loop


def interleaved(pp: int, virtual_stages: int, micro_batches: int) -> Schedule:
    """The bubble of 1F1B divided by ``virtual_stages``, for any number of micro-batches from ``pp`` on.

    A rank takes a group of micro-batches through one of its stages, then through the next. Megatron's groups have
    pp micro-batches each; here their sizes differ by one at most, which keeps the bubble where pp does not divide.
    """
    check_sizes("interleaved", pp, virtual_stages, micro_batches)
    groups = list(_groups(micro_batches, max(1, micro_batches // pp)))
    orders = [_order(rank, pp, virtual_stages, groups) for rank in range(pp)]
    return lower("interleaved", micro_batches, loop(pp, virtual_stages), orders)


def _groups(micro_batches: int, count: int) -> Iterator[range]:
    """Consecutive groups, larger ones first."""
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
