"""Proof, before anything runs, that a schedule is complete, ordered and free of deadlock; and what it will cost.

The wait model is the strictest that a backend can impose: a receive is posted without waiting, a send waits until
its receive is posted (rendezvous), a computation waits for what it consumes, and messages of a channel - sender,
receiver, activation or gradient - are matched in order, as NCCL does, whatever their tags say.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from service.schedules.schedule import Instruction, Op, Schedule

SENDS = {Op.SEND_ACTIVATION: Op.RECV_ACTIVATION, Op.SEND_GRADIENT: Op.RECV_GRADIENT}
RECEIVES = frozenset(SENDS.values())
STEP_TO_PEER = {Op.SEND_ACTIVATION: 1, Op.RECV_ACTIVATION: -1, Op.SEND_GRADIENT: -1, Op.RECV_GRADIENT: 1}
# A backward costs about two forwards: gradients of the input and of the weights.
DURATION = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
Channel = tuple[int, int, bool]


class ScheduleError(ValueError):
    """A schedule that must not run; names the rank and the position of the instruction at fault."""

    def __init__(self, rank: int, index: int | None, message: str) -> None:
        place = f"rank {rank}" if index is None else f"rank {rank}, instruction {index}"
        super().__init__(f"{place}: {message}")
        self.rank, self.index = rank, index


@dataclass(frozen=True)
class Report:
    """Per rank: micro-batches whose activations are kept at once, and receive buffers in use at once.

    ``bubble`` is the predicted idle share of all ranks when a forward takes 1, a backward 2 and a transfer 0.
    """

    peak_activations: tuple[int, ...]
    peak_buffers: tuple[int, ...]
    bubble: float


def verify(schedule: Schedule) -> Report:
    """What the schedule will cost; raises :class:`ScheduleError` if it is not complete, ordered and deadlock-free."""
    for rank in range(len(schedule.ranks)):
        _check_complete(schedule, rank)
        _check_order(schedule, rank)
    _check_channels(schedule)
    _check_progress(schedule)
    costs = [_peaks(schedule, instructions) for instructions in schedule.ranks]
    return Report(tuple(kept for kept, _ in costs), tuple(buffers for _, buffers in costs), _bubble(schedule))


def peer(instruction: Instruction) -> Instruction:
    """The other side of a send or a receive."""
    stage = instruction.stage + STEP_TO_PEER[instruction.op]
    opposite = {**SENDS, **{receive: send for send, receive in SENDS.items()}}
    return Instruction(opposite[instruction.op], stage, instruction.micro_batch)


def _expected(schedule: Schedule, rank: int) -> Iterator[Instruction]:
    """Every instruction that the rank must have exactly once."""
    last = schedule.stages - 1
    for stage in (stage for stage, owner in enumerate(schedule.owners) if owner == rank):
        below = stage > 0 and not schedule.is_local(stage - 1)
        above = stage < last and not schedule.is_local(stage)
        present = [
            (Op.RECV_ACTIVATION, below),
            (Op.FORWARD, True),
            (Op.SEND_ACTIVATION, above),
            (Op.RECV_GRADIENT, above and schedule.trains),
            (Op.BACKWARD, schedule.trains),
            (Op.SEND_GRADIENT, below and schedule.trains),
        ]
        for op in (op for op, needed in present if needed):
            yield from (Instruction(op, stage, each) for each in range(schedule.micro_batches))


def _check_complete(schedule: Schedule, rank: int) -> None:
    expected = set(_expected(schedule, rank))
    seen: set[Instruction] = set()
    for index, instruction in enumerate(schedule.ranks[rank]):
        if instruction not in expected:
            raise ScheduleError(rank, index, f"{instruction} does not belong there")
        if instruction in seen:
            raise ScheduleError(rank, index, f"{instruction} is there twice")
        seen.add(instruction)
    if missing := expected - seen:
        first = min(missing, key=lambda each: (each.micro_batch, each.stage, each.op))
        raise ScheduleError(rank, None, f"{first} is missing, and {len(missing) - 1} more")


def _needs(schedule: Schedule, instruction: Instruction) -> Iterator[Instruction]:
    """What must come before an instruction on its own rank."""
    op, stage, each = instruction.op, instruction.stage, instruction.micro_batch
    if op is Op.FORWARD and stage > 0:
        local = schedule.is_local(stage - 1)
        yield Instruction(Op.FORWARD, stage - 1, each) if local else Instruction(Op.RECV_ACTIVATION, stage, each)
    if op is Op.BACKWARD:
        yield Instruction(Op.FORWARD, stage, each)
        if stage < schedule.stages - 1:
            local = schedule.is_local(stage)
            yield Instruction(Op.BACKWARD, stage + 1, each) if local else Instruction(Op.RECV_GRADIENT, stage, each)
    if op is Op.SEND_ACTIVATION:
        yield Instruction(Op.FORWARD, stage, each)
    if op is Op.SEND_GRADIENT:
        yield Instruction(Op.BACKWARD, stage, each)


def _check_order(schedule: Schedule, rank: int) -> None:
    done: set[Instruction] = set()
    for index, instruction in enumerate(schedule.ranks[rank]):
        for needed in _needs(schedule, instruction):
            if needed not in done:
                raise ScheduleError(rank, index, f"{instruction} comes before {needed}")
        done.add(instruction)


def channel(schedule: Schedule, instruction: Instruction) -> Channel:
    """Sending rank, receiving rank and whether gradients flow: what a backend without tags matches in order."""
    there = schedule.owners[instruction.stage + STEP_TO_PEER[instruction.op]]
    here = schedule.owners[instruction.stage]
    backwards = instruction.op in (Op.SEND_GRADIENT, Op.RECV_GRADIENT)
    return (here, there, backwards) if instruction.op in SENDS else (there, here, backwards)


def _check_channels(schedule: Schedule) -> None:
    sent: dict[Channel, list[Instruction]] = defaultdict(list)
    for instruction in (each for instructions in schedule.ranks for each in instructions if each.op in SENDS):
        sent[channel(schedule, instruction)].append(instruction)
    received: Counter[Channel] = Counter()
    for rank, instructions in enumerate(schedule.ranks):
        for index, instruction in enumerate(instructions):
            if instruction.op not in RECEIVES:
                continue
            key = channel(schedule, instruction)
            arriving = sent[key][received[key]]
            received[key] += 1
            if arriving != peer(instruction):
                raise ScheduleError(rank, index, f"{instruction} would get what {arriving} sends: order differs")


def _check_progress(schedule: Schedule) -> None:
    """Run the wait model to its end; a rank that cannot go on while no other can either is a deadlock."""
    position = [0] * len(schedule.ranks)
    done: set[Instruction] = set()
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(schedule.ranks):
            while position[rank] < len(instructions) and not _waits_for(instructions[position[rank]], done):
                done.add(instructions[position[rank]])
                position[rank] += 1
                moved = True
    for rank, instructions in enumerate(schedule.ranks):
        if position[rank] < len(instructions):
            stuck = instructions[position[rank]]
            raise ScheduleError(rank, position[rank], f"deadlock: {stuck} waits for {_waits_for(stuck, done)}")


def _waits_for(instruction: Instruction, done: set[Instruction]) -> Instruction | None:
    """What another rank must do first."""
    if instruction.op in SENDS:
        awaited = peer(instruction)
    elif instruction.op in DURATION:
        receive = Op.RECV_ACTIVATION if instruction.op is Op.FORWARD else Op.RECV_GRADIENT
        posted = Instruction(receive, instruction.stage, instruction.micro_batch)
        if posted not in done:
            return None
        awaited = peer(posted)
    else:
        return None
    return None if awaited in done else awaited


def _peaks(schedule: Schedule, instructions: tuple[Instruction, ...]) -> tuple[int, int]:
    """Most activations kept for a backward, and most receive buffers in use, at any time on one rank.

    A received activation is in use until its backward (its forward, where nothing trains); so is a gradient.
    """
    kept = peak_kept = buffers = peak_buffers = 0
    received: Counter[tuple[int, int]] = Counter()
    for instruction in instructions:
        place = (instruction.stage, instruction.micro_batch)
        if instruction.op in RECEIVES:
            received[place] += 1
            buffers += 1
        kept += schedule.trains * (instruction.op is Op.FORWARD)
        peak_kept, peak_buffers = max(peak_kept, kept), max(peak_buffers, buffers)
        if instruction.op is (Op.BACKWARD if schedule.trains else Op.FORWARD):
            kept -= schedule.trains
            buffers -= received.pop(place, 0)
    return peak_kept, peak_buffers


def _bubble(schedule: Schedule) -> float:
    """Idle share under :data:`DURATION`, with transfers and sends that take no time."""
    queues = [deque(each for each in instructions if each.op in DURATION) for instructions in schedule.ranks]
    busy = sum(DURATION[each.op] for queue in queues for each in queue)
    finished: dict[Instruction, float] = {}
    clock = [0.0] * len(queues)
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and ((source := _source(queue[0], schedule.stages)) is None or source in finished):
                instruction = queue.popleft()
                start = clock[rank] if source is None else max(clock[rank], finished[source])
                clock[rank] = finished[instruction] = start + DURATION[instruction.op]
    return 1 - busy / (len(clock) * max(clock))


def _source(compute: Instruction, stages: int) -> Instruction | None:
    """The neighbouring stage's computation whose result this one consumes."""
    neighbour = compute.stage + (-1 if compute.op is Op.FORWARD else 1)
    return Instruction(compute.op, neighbour, compute.micro_batch) if 0 <= neighbour < stages else None
