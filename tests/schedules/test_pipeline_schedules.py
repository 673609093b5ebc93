"""Schedules and their verifier: every generated schedule passes, every damaged one is caught."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lanes import examples

from service.schedules import GENERATORS, forward_only, generator
from service.schedules.schedule import (
    BACKWARDS,
    COMPUTATIONS,
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    loop,
    lower,
    vee,
)
from service.schedules.verify import RECEIVES, SENDS, Report, channel, peer, predict, verify

VIRTUAL = {"interleaved": 2, "zbv": 2}
RANKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 20)


# Time is not what is tested, and a machine that runs other things as well is slow at times.
sampled = settings(deadline=None, max_examples=examples(30, 100))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name, ranks, micro_batches = draw(st.sampled_from([*GENERATORS])), draw(RANKS), draw(MICRO_BATCHES)
    virtual = draw(st.integers(1, 4)) if name == "interleaved" else VIRTUAL.get(name, 1)
    made = generator(name)(ranks, virtual, micro_batches)
    return forward_only(made.owners, micro_batches) if draw(st.booleans()) else made


def report_of(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Report:
    return verify(generator(name)(ranks, virtual or VIRTUAL.get(name, 1), micro_batches))


def runs_on_queues(schedule: Schedule, seed: int) -> bool:
    """An independent judge: ranks take turns at random; messages are FIFO per channel, whatever they are called."""
    rng, queues, position = random.Random(seed), defaultdict(deque), [0] * len(schedule.ranks)
    expected: dict[tuple[int, int, bool], deque[Instruction]] = defaultdict(deque)
    arrived: set[Instruction] = set()
    while True:
        ready = [rank for rank, each in enumerate(schedule.ranks) if position[rank] < len(each)]
        if not ready:
            return True
        rng.shuffle(ready)
        for rank in ready:
            instruction = schedule.ranks[rank][position[rank]]
            if instruction.op in SENDS:
                queues[channel(schedule, instruction)].append(instruction)
            elif instruction.op in RECEIVES:
                expected[channel(schedule, instruction)].append(instruction)
            elif instruction.op is Op.FORWARD or instruction.op in BACKWARDS:
                receive = Op.RECV_ACTIVATION if instruction.op is Op.FORWARD else Op.RECV_GRADIENT
                awaited = Instruction(receive, instruction.stage, instruction.micro_batch)
                for key, posted in expected.items():
                    while posted and queues[key]:
                        got, wanted = queues[key].popleft(), posted.popleft()
                        if peer(wanted) != got:
                            return False
                        arrived.add(wanted)
                boundary = instruction.stage - (instruction.op is Op.FORWARD)
                remote = 0 <= boundary < schedule.stages - 1 and not schedule.is_local(boundary)
                if remote and awaited not in arrived:
                    continue
            position[rank] += 1
            break
        else:
            return False


@sampled
@given(schedules(), st.integers(0, 2**16))
def test_generated_schedules_pass_and_run(schedule: Schedule, seed: int) -> None:
    verify(schedule)
    assert runs_on_queues(schedule, seed)


@sampled
@given(schedules())
def test_predictions_keep_every_dependency(schedule: Schedule) -> None:
    """A rank does one thing at a time, and nothing before the neighbouring stage has what it needs."""
    spans = predict(schedule)
    ended = {span.instruction: span.end for span in spans}
    for earlier, later in pairwise(spans):
        assert earlier.rank != later.rank or earlier.end <= later.start
    for span in spans:
        op, stage, each = span.instruction.op, span.instruction.stage, span.instruction.micro_batch
        if op is Op.FORWARD and stage > 0:
            assert ended[Instruction(op, stage - 1, each)] <= span.start
        if op in BACKWARDS:
            assert ended[Instruction(Op.FORWARD, stage, each)] <= span.start
            if stage + 1 < schedule.stages:
                assert ended[Instruction(op, stage + 1, each)] <= span.start
        if op is Op.BACKWARD_WEIGHT:
            assert ended[Instruction(Op.BACKWARD_INPUT, stage, each)] <= span.start
    assert sum(each.op in COMPUTATIONS for order in schedule.ranks for each in order) == len(spans)


@sampled
@given(RANKS, MICRO_BATCHES)
def test_costs_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    everything, flushed = report_of("gpipe", ranks, micro_batches), report_of("1f1b", ranks, micro_batches)
    assert everything.peak_activations == (micro_batches,) * ranks
    assert flushed.peak_activations == tuple(min(ranks - rank, micro_batches) for rank in range(ranks))
    # Both idle (p - 1)/(m + p - 1) of the time.
    ideal = (ranks - 1) / (micro_batches + ranks - 1)
    assert everything.bubble == pytest.approx(ideal)
    assert flushed.bubble == pytest.approx(ideal)


@sampled
@given(st.integers(2, 8), st.integers(2, 4), st.integers(0, 24))
def test_interleaving_divides_the_bubble(ranks: int, virtual: int, more: int) -> None:
    """3·(p - 1) idle units of 3·v·m, whether or not p divides m, against 3·(p - 1) of 3·m without."""
    micro_batches = ranks + more
    report = report_of("interleaved", ranks, micro_batches, virtual)
    assert report.bubble == pytest.approx((ranks - 1) / (virtual * micro_batches + ranks - 1))
    assert report.bubble < report_of("1f1b", ranks, micro_batches).bubble


@pytest.mark.slow
@sampled
@given(st.integers(2, 8), st.integers(1, 24))
def test_split_backwards_leave_a_smaller_bubble(ranks: int, micro_batches: int) -> None:
    flushed = report_of("1f1b", ranks, micro_batches)
    split, vee_shaped = report_of("zero_bubble", ranks, micro_batches), report_of("zbv", ranks, micro_batches)
    assert split.bubble < flushed.bubble
    assert vee_shaped.bubble < flushed.bubble
    assert max(split.peak_activations) == min(ranks, micro_batches)
    assert max(vee_shaped.peak_activations) <= 2 * ranks
    if micro_batches >= ranks:
        assert split.bubble == pytest.approx((ranks - 1) / (3 * micro_batches + ranks - 1))
    if micro_batches >= 2 * ranks - 1:
        assert vee_shaped.bubble == pytest.approx((ranks - 1) / (6 * micro_batches + ranks - 1))
        assert vee_shaped.bubble < min(split.bubble, report_of("interleaved", ranks, micro_batches).bubble)


@pytest.mark.parametrize("name", GENERATORS)
@sampled
@given(ranks=RANKS)
def test_memory_is_bounded_by_depth(name: str, ranks: int) -> None:
    few, many = (report_of(name, ranks, count) for count in (4 * ranks, 8 * ranks))
    assert few.peak_receives == many.peak_receives
    assert max(many.peak_receives) <= ranks + 2
    if name != "gpipe":  # which keeps every input until its backward, as part of its activations
        assert few.peak_activations == many.peak_activations
        assert few.peak_buffers == many.peak_buffers
        assert max(many.peak_buffers) <= 2 * max(many.peak_activations) + 2
    owners = generator(name)(ranks, VIRTUAL.get(name, 1), 1).owners
    assert max(verify(forward_only(owners, 64)).peak_buffers) <= 3


def test_receive_buffers_of_four_ranks_and_32_micro_batches() -> None:
    for name in GENERATORS:
        report = report_of(name, 4, 32)
        stages = 4 * VIRTUAL.get(name, 1)
        print(f"{name}: receives waiting {report.peak_receives}, buffers with kept inputs {report.peak_buffers}")
        assert max(report.peak_receives) <= stages
        assert max(report.peak_buffers) <= (2 * stages if name != "gpipe" else 32 + 2)


def damaged(schedule: Schedule, rank: int, instructions: list[Instruction]) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(instructions), *schedule.ranks[rank + 1 :]))


@sampled
@given(schedules(), st.data())
def test_a_dropped_instruction_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    instructions = list(schedule.ranks[rank])
    dropped = instructions.pop(data.draw(st.integers(0, len(instructions) - 1)))
    with pytest.raises(ScheduleError) as caught:
        verify(damaged(schedule, rank, instructions))
    assert caught.value.rank == rank
    assert str(dropped) in str(caught.value)


@sampled
@given(schedules(), st.data())
def test_a_duplicated_instruction_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    instructions = list(schedule.ranks[rank])
    source, target = (data.draw(st.integers(0, len(instructions) - 1)) for _ in range(2))
    instructions.insert(target, instructions[source])
    with pytest.raises(ScheduleError, match="is there twice") as caught:
        verify(damaged(schedule, rank, instructions))
    assert caught.value.rank == rank
    copies = [index for index, each in enumerate(instructions) if each == instructions[target]]
    assert caught.value.index == copies[1]


@sampled
@given(schedules(), st.data(), st.integers(0, 2**16))
def test_a_swap_is_caught_or_harmless(schedule: Schedule, data: st.DataObject, seed: int) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    instructions = list(schedule.ranks[rank])
    assume(len(instructions) > 1)
    first, second = (data.draw(st.integers(0, len(instructions) - 1)) for _ in range(2))
    instructions[first], instructions[second] = instructions[second], instructions[first]
    swapped = damaged(schedule, rank, instructions)
    try:
        verify(swapped)
    except ScheduleError:
        return
    assert runs_on_queues(swapped, seed)


@pytest.mark.parametrize("name", ["zero_bubble", "zbv"])
def test_halves_of_a_backward_have_an_order(name: str) -> None:
    schedule = generator(name)(2, VIRTUAL.get(name, 1), 4)
    instructions = list(schedule.ranks[0])
    stage = next(each.stage for each in instructions if each.op is Op.BACKWARD_WEIGHT)
    early = [each for each in instructions if each != Instruction(Op.BACKWARD_WEIGHT, stage, 1)]
    early.insert(early.index(Instruction(Op.BACKWARD_INPUT, stage, 1)), Instruction(Op.BACKWARD_WEIGHT, stage, 1))
    with pytest.raises(ScheduleError, match=rf"backward_weight of stage {stage}, micro-batch 1 comes before"):
        verify(damaged(schedule, 0, early))
    reduce = Instruction(Op.REDUCE, stage, 0)
    soon = [reduce, *(each for each in instructions if each != reduce)]
    with pytest.raises(ScheduleError, match=rf"rank 0, instruction 0: reduce of stage {stage} comes before"):
        verify(damaged(schedule, 0, soon))


@pytest.mark.parametrize("name", GENERATORS)
def test_messages_out_of_order_are_caught(name: str) -> None:
    """What tags would repair on gloo and NCCL would silently mix up."""
    schedule = generator(name)(2, VIRTUAL.get(name, 1), 4)
    instructions = list(schedule.ranks[1])
    receives = [index for index, each in enumerate(instructions) if each.op is Op.RECV_ACTIVATION]
    first, second = receives[:2]
    instructions.insert(first, instructions.pop(second))
    with pytest.raises(ScheduleError, match="order differs"):
        verify(damaged(schedule, 1, instructions))


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "gpipe"])
def test_a_deadlock_is_caught_and_named(name: str) -> None:
    """Each rank sends before it posts its receive: fine with buffered sends, a deadlock where sends wait."""
    schedule = generator(name)(2, VIRTUAL.get(name, 1), 4)
    late = []
    for instructions in schedule.ranks:
        order = list(instructions)
        for index in range(len(order) - 2, -1, -1):
            if order[index].op in RECEIVES:
                receive = order.pop(index)
                ops = {Op.FORWARD} if receive.op is Op.RECV_ACTIVATION else BACKWARDS
                users = {Instruction(op, receive.stage, receive.micro_batch) for op in ops}
                order.insert(next(at for at, each in enumerate(order) if each in users), receive)
        late.append(tuple(order))
    with pytest.raises(ScheduleError, match=r"rank \d, instruction \d+: (deadlock: .* waits for|.* order differs)"):
        verify(replace(schedule, ranks=tuple(late)))


def test_orders_that_never_end_are_refused_when_lowered() -> None:
    forward, backward = Instruction(Op.FORWARD, 0, 0), Instruction(Op.BACKWARD, 0, 0)
    orders = [[backward, forward], [Instruction(Op.FORWARD, 1, 0), Instruction(Op.BACKWARD, 1, 0)]]
    with pytest.raises(ScheduleError, match="rank 0: deadlock: the neighbours never do what backward of stage 0"):
        lower("stuck", 1, (0, 1), orders)


def test_misplaced_instructions_are_named() -> None:
    schedule = generator("1f1b")(2, 1, 2)
    forward = Instruction(Op.FORWARD, 0, 0)
    with pytest.raises(ScheduleError, match="rank 1, instruction 0: forward of stage 0, micro-batch 0 does not belong"):
        verify(damaged(schedule, 1, [forward, *schedule.ranks[1]]))
    backwards = [*schedule.ranks[0]][::-1]
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 0: .* comes before"):
        verify(damaged(schedule, 0, backwards))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(0, 1), (1, 0)])
def test_empty_schedules_are_refused(ranks: int, micro_batches: int) -> None:
    for name, make in GENERATORS.items():
        with pytest.raises(ValueError, match=f"a schedule needs a rank, a stage and a micro-batch, not pp={ranks}"):
            make(ranks, VIRTUAL.get(name, 1), micro_batches)
    with pytest.raises(ValueError, match="a schedule needs a rank"):
        forward_only((), 1)


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 2), ("1f1b", 2), ("zero_bubble", 2), ("zbv", 1), ("zbv", 3)])
def test_stages_that_a_schedule_does_not_have_are_refused(name: str, virtual: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} has \d stages? on each rank, not virtual_stages={virtual}"):
        generator(name)(2, virtual, 4)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="no schedule 'zigzag'; expected one of gpipe, 1f1b, interleaved"):
        generator("zigzag")


def test_owners_go_round_or_down_and_up() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)


def test_a_schedule_as_it_is_drawn() -> None:
    """ZB-H1 on two ranks, written out: F, I and W with the micro-batch."""
    letters = {Op.FORWARD: "F", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
    schedule = generator("zero_bubble")(2, 1, 3)
    text = [
        " ".join(f"{letters[each.op]}{each.micro_batch}" for each in order if each.op in letters)
        for order in schedule.ranks
    ]
    assert text == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
