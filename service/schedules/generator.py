"""Defines what a schedule is made of, and lowers its order of computations to whole instruction lists."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from service.schedules.clock import ScheduleClock
from service.schedules.schedule import BACKWARDS, Instruction, Op, Schedule, check_sizes, loop

Orders = Callable[[int, int, int], list[list[Instruction]]]
"""Maps ``(pp, virtual_stages, micro_batches)`` to the computations of each rank, in order."""


@dataclass(frozen=True)
class Generator:
    """Writes the schedule ``name`` for any pipeline.

    ``owners(pp, virtual_stages)`` are the ranks of its stages. A rank has ``stages_per_rank`` stages where a spec does
    not say otherwise, which it may only with ``takes_any_stages``.
    """

    name: str
    orders: Orders
    owners: Callable[[int, int], tuple[int, ...]] = loop
    stages_per_rank: int = 1
    takes_any_stages: bool = False

    def __call__(self, pp: int, virtual_stages: int, micro_batches: int) -> Schedule:
        """Return the schedule of ``pp`` ranks; raises ``ValueError`` for impossible sizes."""
        check_sizes(pp, virtual_stages, micro_batches)
        if (refusal := self.refusal(virtual_stages)) is not None:
            raise ValueError(f"{refusal}, not {virtual_stages=}")
        orders = self.orders(pp, virtual_stages, micro_batches)
        return lower(self.name, micro_batches, self.owners(pp, virtual_stages), orders)

    def refusal(self, virtual_stages: int) -> str | None:
        """Return why a rank cannot have so many stages, or None."""
        if self.takes_any_stages or virtual_stages == self.stages_per_rank:
            return None
        plural = "s" if self.stages_per_rank > 1 else ""
        return f"{self.name} has {self.stages_per_rank} stage{plural} on each rank"


def lower(
    name: str,
    micro_batches: int,
    owners: tuple[int, ...],
    orders: Sequence[Sequence[Instruction]],
    *,
    trains: bool = True,
) -> Schedule:
    """Add sends, receives and reductions to the computations of each rank.

    A result is sent right after its computation. Its receive stands where its receiver is, on the clock of
    :mod:`service.schedules.clock`, when the result is ready: behind the computation that the receiver is at, before
    that one's own sends. So messages between two ranks are received in the order in which they are sent; a buffer
    is taken no earlier than it can be filled; and even sends that wait for their receive can't deadlock, because a
    send waits only for computations that started before its own had ended.
    """
    clock = ScheduleClock(len(owners), orders)
    starts = [[span.start for span in spans] for spans in clock.spans]
    arriving: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in orders]
    for span in sorted((span for spans in clock.spans for span in spans), key=lambda span: (span.end, span.rank)):
        for receive in _receives(span.instruction, owners):
            receiver = owners[receive.stage]
            arriving[receiver][bisect_left(starts[receiver], span.end)].append(receive)
    ranks = []
    for rank, order in enumerate(orders):
        last_weights = {each.stage: index for index, each in enumerate(order) if each.op is Op.BACKWARD_WEIGHT}
        instructions = list(arriving[rank][0])
        for index, compute in enumerate(order):
            instructions += [compute, *arriving[rank][index + 1], *_sends(compute, owners)]
            if last_weights.get(compute.stage) == index:
                instructions.append(Instruction(Op.REDUCE, compute.stage, 0))
        ranks.append(tuple(instructions))
    return Schedule(name, micro_batches, owners, tuple(ranks), trains)


def _sends(compute: Instruction, owners: tuple[int, ...]) -> Iterator[Instruction]:
    stage, each = compute.stage, compute.micro_batch
    if compute.op is Op.FORWARD and stage + 1 < len(owners) and owners[stage + 1] != owners[stage]:
        yield Instruction(Op.SEND_ACTIVATION, stage, each)
    if compute.op in BACKWARDS and stage > 0 and owners[stage - 1] != owners[stage]:
        yield Instruction(Op.SEND_GRADIENT, stage, each)


def _receives(compute: Instruction, owners: tuple[int, ...]) -> Iterator[Instruction]:
    """Return the receives of the results that ``compute`` sends."""
    for send in _sends(compute, owners):
        forward = send.op is Op.SEND_ACTIVATION
        op, stage = (Op.RECV_ACTIVATION, send.stage + 1) if forward else (Op.RECV_GRADIENT, send.stage - 1)
        yield Instruction(op, stage, send.micro_batch)
