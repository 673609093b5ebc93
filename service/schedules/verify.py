"""Proves, before anything runs, that a schedule is complete, ordered and free of deadlock, and predicts its cost.

The wait model is the strictest that a backend can impose: a receive is posted without waiting, a send waits until
its receive is posted (rendezvous), a computation waits for what it consumes, and messages of a channel - sender,
receiver, activation or gradient - are matched in order, as NCCL does, whatever their tags say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from service.schedules.schedule import (
    BACKWARDS,
    COMPUTATIONS,
    ComputationSpan,
    Instruction,
    Op,
    Schedule,
    ScheduleClock,
    ScheduleError,
)

SENDS = {Op.SEND_ACTIVATION: Op.RECV_ACTIVATION, Op.SEND_GRADIENT: Op.RECV_GRADIENT}
RECEIVES = frozenset(SENDS.values())
_STEP_TO_PEER = {Op.SEND_ACTIVATION: 1, Op.RECV_ACTIVATION: -1, Op.SEND_GRADIENT: -1, Op.RECV_GRADIENT: 1}
_OPPOSITE = {**SENDS, **{receive: send for send, receive in SENDS.items()}}
Channel = tuple[int, int, bool]


@dataclass(frozen=True)
class Report:
    """Per rank, the most at any one time: ``peak_activations`` counts (stage, micro-batch) pairs between forward and
    the end of backward; ``peak_receives`` messages asked for and not yet used; ``peak_buffers`` these and those that
    a stage still needs as its input or output gradient.

    ``bubble`` is the predicted idle share of all ranks when a forward takes 1, each half of a backward 1, a transfer
    nothing.
    """

    peak_activations: tuple[int, ...]
    peak_receives: tuple[int, ...]
    peak_buffers: tuple[int, ...]
    bubble: float


def verify(schedule: Schedule) -> Report:
    """Check the schedule and return what it will cost; raises :class:`ScheduleError` if it is not complete, ordered and
    deadlock-free.
    """
    for rank in range(len(schedule.ranks)):
        _check_complete(schedule, rank)
        _check_order(schedule, rank)
    _check_channels(schedule)
    _check_progress(schedule)
    peaks = [_peaks(schedule, instructions) for instructions in schedule.ranks]
    activations, receives, buffers = zip(*peaks, strict=True)
    return Report(activations, receives, buffers, _bubble(schedule))


def predict(schedule: Schedule) -> tuple[ComputationSpan, ...]:
    """Return when each rank will compute what, rank by rank in order of time, as :class:`Report` assumes."""
    return tuple(span for spans in _clock(schedule).spans for span in spans)


def _bubble(schedule: Schedule) -> float:
    """Return the predicted idle share of all ranks, under the assumptions of :class:`Report`."""
    clock = _clock(schedule)
    busy = sum(span.end - span.start for spans in clock.spans for span in spans)
    return 1 - busy / (len(schedule.ranks) * clock.makespan)


def _clock(schedule: Schedule) -> ScheduleClock:
    return ScheduleClock(
        schedule.stages, [[each for each in order if each.op in COMPUTATIONS] for order in schedule.ranks]
    )


def peer(instruction: Instruction) -> Instruction:
    """Return the other side of a send or a receive."""
    stage = instruction.stage + _STEP_TO_PEER[instruction.op]
    return Instruction(_OPPOSITE[instruction.op], stage, instruction.micro_batch)


def _expected(schedule: Schedule, rank: int) -> Iterator[Instruction]:
    """Yield the instructions that the rank must have exactly once. One split backward of a stage splits all of them."""
    last = schedule.stages - 1
    halves = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.REDUCE}
    split = {each.stage for each in schedule.ranks[rank] if each.op in halves}
    for stage in (stage for stage, owner in enumerate(schedule.owners) if owner == rank):
        below = stage > 0 and not schedule.is_local(stage - 1)
        above = stage < last and not schedule.is_local(stage)
        trains, splits = schedule.trains, schedule.trains and stage in split
        present = [
            (Op.RECV_ACTIVATION, below),
            (Op.FORWARD, True),
            (Op.SEND_ACTIVATION, above),
            (Op.RECV_GRADIENT, above and trains),
            (Op.BACKWARD, trains and not splits),
            (Op.BACKWARD_INPUT, splits),
            (Op.BACKWARD_WEIGHT, splits),
            (Op.SEND_GRADIENT, below and trains),
        ]
        for op in (op for op, needed in present if needed):
            yield from (Instruction(op, stage, each) for each in range(schedule.micro_batches))
        if splits:
            yield Instruction(Op.REDUCE, stage, 0)


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


def _needs(schedule: Schedule, instruction: Instruction, done: set[Instruction]) -> Iterator[Instruction]:
    """Return the instructions that must precede this one on its own rank."""
    op, stage, each = instruction.op, instruction.stage, instruction.micro_batch
    if op is Op.FORWARD and stage > 0:
        local = schedule.is_local(stage - 1)
        yield Instruction(Op.FORWARD, stage - 1, each) if local else Instruction(Op.RECV_ACTIVATION, stage, each)
    elif op in BACKWARDS:
        yield Instruction(Op.FORWARD, stage, each)
        if stage < schedule.stages - 1:
            local = schedule.is_local(stage)
            yield _backward(stage + 1, each, done) if local else Instruction(Op.RECV_GRADIENT, stage, each)
    elif op is Op.BACKWARD_WEIGHT:
        yield Instruction(Op.BACKWARD_INPUT, stage, each)
    elif op is Op.REDUCE:
        yield from (Instruction(Op.BACKWARD_WEIGHT, stage, each) for each in range(schedule.micro_batches))
    elif op is Op.SEND_ACTIVATION:
        yield Instruction(Op.FORWARD, stage, each)
    elif op is Op.SEND_GRADIENT:
        yield _backward(stage, each, done)


def _backward(stage: int, micro_batch: int, done: set[Instruction]) -> Instruction:
    """Return the instruction that passes on the gradient of a stage's input: whole, or the first half."""
    whole = Instruction(Op.BACKWARD, stage, micro_batch)
    return whole if whole in done else Instruction(Op.BACKWARD_INPUT, stage, micro_batch)


def _check_order(schedule: Schedule, rank: int) -> None:
    done: set[Instruction] = set()
    for index, instruction in enumerate(schedule.ranks[rank]):
        for needed in _needs(schedule, instruction, done):
            if needed not in done:
                raise ScheduleError(rank, index, f"{instruction} comes before {needed}")
        done.add(instruction)


def channel(schedule: Schedule, instruction: Instruction) -> Channel:
    """Return the sending rank, the receiving rank and whether gradients flow: what a backend without tags matches in
    order.
    """
    there = schedule.owners[instruction.stage + _STEP_TO_PEER[instruction.op]]
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
    """Return the instructions of other ranks that must come first."""
    message = instruction if instruction.op in SENDS else _receive_of(instruction)
    if message is None or (message is not instruction and message not in done):
        return None
    return None if (awaited := peer(message)) in done else awaited


def _receive_of(compute: Instruction) -> Instruction | None:
    """Return what brings a computation its input, if that comes from another stage."""
    if compute.op is not Op.FORWARD and compute.op not in BACKWARDS:
        return None
    receive = Op.RECV_ACTIVATION if compute.op is Op.FORWARD else Op.RECV_GRADIENT
    return Instruction(receive, compute.stage, compute.micro_batch)


def _peaks(schedule: Schedule, instructions: tuple[Instruction, ...]) -> tuple[int, int, int]:
    """Return the most activations, unused messages and receive buffers at once on a rank; a backward ends with its
    weights.
    """
    kept = waiting = buffers = 0
    peaks = (0, 0, 0)
    held: Counter[tuple[int, int]] = Counter()
    split = any(each.op is Op.BACKWARD_WEIGHT for each in instructions)
    ends = (Op.BACKWARD_WEIGHT if split else Op.BACKWARD) if schedule.trains else Op.FORWARD
    posted: set[Instruction] = set()
    for instruction in instructions:
        place = (instruction.stage, instruction.micro_batch)
        if instruction.op in RECEIVES:
            held[place] += 1
            buffers += 1
            waiting += 1
            posted.add(instruction)
        kept += schedule.trains and instruction.op is Op.FORWARD
        peaks = (max(peaks[0], kept), max(peaks[1], waiting), max(peaks[2], buffers))
        waiting -= _receive_of(instruction) in posted
        if instruction.op is ends:
            kept -= schedule.trains
            buffers -= held.pop(place, 0)
    return peaks
