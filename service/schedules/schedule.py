"""Defines schedules as plain data, without torch: the instructions of each pipeline rank, in order, and when they run.

A schedule is written as the order of computations per rank; :func:`lower` adds sends, receives and reductions. Stages
are virtual: a rank may own several.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """The action of an instruction for ``stage``: sends go to, and receives come from, the neighbour that the name
    implies.

    Activations move from stage s to s + 1, gradients from s to s - 1. ``BACKWARD`` computes the gradients of input and
    weights; ``BACKWARD_INPUT`` and ``BACKWARD_WEIGHT`` are its halves. ``REDUCE`` adds up the data-parallel ranks'
    gradients of a stage whose backward is split; otherwise the last backward does so.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    REDUCE = "reduce"
    SEND_ACTIVATION = "send_activation"
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"
    RECV_GRADIENT = "recv_gradient"


COMPUTATIONS = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
# The computations that pass a gradient on to the stage before.
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank. ``micro_batch`` is 0 for an instruction about all of them (``REDUCE``)."""

    op: Op
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        place = f"{self.op} of stage {self.stage}"
        return place if self.op is Op.REDUCE else f"{place}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Each rank's instructions. ``owners[s]`` is the rank of stage s; without ``trains`` there are only forwards."""

    name: str
    micro_batches: int
    owners: tuple[int, ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    trains: bool = True

    @property
    def stages(self) -> int:
        return len(self.owners)

    def is_local(self, boundary: int) -> bool:
        """Return whether stages ``boundary`` and ``boundary + 1`` are on one rank, so that nothing is sent."""
        return self.owners[boundary] == self.owners[boundary + 1]


class ScheduleError(ValueError):
    """A schedule that must not run; names the rank and the position of the instruction at fault."""

    def __init__(self, rank: int, index: int | None, message: str) -> None:
        place = f"rank {rank}" if index is None else f"rank {rank}, instruction {index}"
        super().__init__(f"{place}: {message}")
        self.rank, self.index = rank, index


def loop(pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the owners of stages that cycle through the ranks: 0 … pp - 1, 0 … pp - 1, and so on."""
    return tuple(range(pp)) * virtual_stages


def vee(pp: int, virtual_stages: int = 2) -> tuple[int, ...]:
    """Return the owners of two stages per rank, down the ranks and back up: 0 … pp - 1, pp - 1 … 0."""
    assert virtual_stages == 2
    return (*range(pp), *reversed(range(pp)))


def check_sizes(pp: int, virtual_stages: int, micro_batches: int) -> None:
    """Raise ``ValueError`` for sizes that no schedule can have."""
    if min(pp, virtual_stages, micro_batches) < 1:
        raise ValueError(
            f"a schedule needs a rank, a stage and a micro-batch, not {pp=}, {virtual_stages=}, {micro_batches=}"
        )


# The gradients of inputs and of weights are about one forward each: two matrix products instead of one.
_DURATION = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


@dataclass(frozen=True, slots=True)
class ComputationSpan:
    """A computation of ``rank`` in units of a forward's time."""

    rank: int
    instruction: Instruction
    start: float
    end: float


class ScheduleClock:
    """Computes when each rank's computations run, in order; raises :class:`ScheduleError` if one is never ready."""

    def __init__(self, stages: int, orders: Sequence[Sequence[Instruction]]) -> None:
        self.stages, self.orders = stages, orders
        self.spans: list[list[ComputationSpan]] = [[] for _ in orders]
        self._finished: dict[tuple[bool, int, int], float] = {}
        self._run()

    @property
    def makespan(self) -> float:
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def _run(self) -> None:
        moved = True
        while moved:
            moved = sum(self._advance(rank) for rank in range(len(self.orders))) > 0
        for rank, order in enumerate(self.orders):
            if len(self.spans[rank]) < len(order):
                stuck = order[len(self.spans[rank])]
                raise ScheduleError(rank, None, f"deadlock: the neighbours never do what {stuck} needs")

    def _advance(self, rank: int) -> bool:
        """Run the rank as far as it can go, and return whether it advanced."""
        order, spans = self.orders[rank], self.spans[rank]
        before = len(spans)
        now = spans[-1].end if spans else 0.0
        while len(spans) < len(order):
            instruction = order[len(spans)]
            ready = self._ready(instruction)
            if ready is None:
                break
            start = max(now, ready)
            now = start + _DURATION[instruction.op]
            spans.append(ComputationSpan(rank, instruction, start, now))
            if instruction.op is Op.FORWARD or instruction.op in BACKWARDS:
                self._finished[instruction.op is Op.FORWARD, instruction.stage, instruction.micro_batch] = now
        return len(spans) > before

    def _ready(self, instruction: Instruction) -> float | None:
        """Return when the neighbouring stage has an instruction's input; ``None`` if not yet known."""
        forward = instruction.op is Op.FORWARD
        if not forward and instruction.op not in BACKWARDS:
            return 0.0
        source = instruction.stage - 1 if forward else instruction.stage + 1
        if not 0 <= source < self.stages:
            return 0.0
        return self._finished.get((forward, source, instruction.micro_batch))


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
    :mod:`service.schedules.schedule`, when the result is ready: behind the computation that the receiver is at, before
    that one's own sends. So messages between two ranks are received in the order in which they are sent; a buffer
    is taken no earlier than it can be filled; and even sends that wait for their receive can't deadlock, because a
    send waits only for computations that started before its own had ended.
    """
    arriving = _place_receives(owners, orders)
    ranks = (_instructions(order, receives, owners) for order, receives in zip(orders, arriving, strict=True))
    return Schedule(name, micro_batches, owners, tuple(map(tuple, ranks)), trains)


def _place_receives(
    owners: tuple[int, ...], orders: Sequence[Sequence[Instruction]]
) -> list[dict[int, list[Instruction]]]:
    """Return the receives of each rank, by the number of computations before them."""
    clock = ScheduleClock(len(owners), orders)
    starts = [[span.start for span in spans] for spans in clock.spans]
    arriving: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in orders]
    for span in sorted((span for spans in clock.spans for span in spans), key=lambda span: (span.end, span.rank)):
        for receive in _receives(span.instruction, owners):
            receiver = owners[receive.stage]
            arriving[receiver][bisect_left(starts[receiver], span.end)].append(receive)
    return arriving


def _instructions(
    order: Sequence[Instruction], receives: dict[int, list[Instruction]], owners: tuple[int, ...]
) -> Iterator[Instruction]:
    """Yield a rank's computations, and their messages and reductions among them."""
    last_weights = {each.stage: index for index, each in enumerate(order) if each.op is Op.BACKWARD_WEIGHT}
    yield from receives[0]
    for index, compute in enumerate(order):
        yield compute
        yield from receives[index + 1]
        yield from _sends(compute, owners)
        if last_weights.get(compute.stage) == index:
            yield Instruction(Op.REDUCE, compute.stage, 0)


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
