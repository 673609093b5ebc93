"""Schedules and their verifier: every generated schedule passes, every damaged one is caught."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from service.schedules.schedule import (
    GENERATORS,
    Generator,
    Instruction,
    Op,
    Schedule,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
)
from service.schedules.verify import RECEIVES, SENDS, ScheduleError, channel, peer, verify

GENERATED = st.sampled_from([*GENERATORS.values(), forward_only])
STAGES, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 16)
SCHEDULES = st.builds(lambda generator, stages, count: generator(stages, count), GENERATED, STAGES, MICRO_BATCHES)


def looped(ranks: int, micro_batches: int) -> Schedule:
    """Two stages per rank, breadth first: a schedule with virtual stages that is not among ours."""
    owners = tuple(stage % ranks for stage in range(2 * ranks))
    orders = []
    for rank in range(ranks):
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        forwards = [Instruction(Op.FORWARD, stage, each) for stage in own for each in range(micro_batches)]
        backwards = [Instruction(Op.BACKWARD, stage, each) for stage in own[::-1] for each in range(micro_batches)]
        orders.append(forwards + backwards)
    return lower("looped", micro_batches, owners, orders, ahead=micro_batches)


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
            else:
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


@given(SCHEDULES, st.integers(0, 2**16))
def test_generated_schedules_pass_and_run(schedule: Schedule, seed: int) -> None:
    verify(schedule)
    assert runs_on_queues(schedule, seed)


@given(st.integers(1, 4), MICRO_BATCHES)
def test_schedules_with_virtual_stages_pass(ranks: int, micro_batches: int) -> None:
    assert verify(looped(ranks, micro_batches)).peak_activations == (2 * micro_batches,) * ranks


@given(STAGES, MICRO_BATCHES)
def test_costs_are_those_of_the_papers(stages: int, micro_batches: int) -> None:
    everything, flushed = verify(gpipe(stages, micro_batches)), verify(one_f_one_b(stages, micro_batches))
    assert everything.peak_activations == (micro_batches,) * stages
    assert flushed.peak_activations == tuple(min(stages - stage, micro_batches) for stage in range(stages))
    # Both idle (p - 1)/(m + p - 1) of the time.
    ideal = (stages - 1) / (micro_batches + stages - 1)
    assert everything.bubble == pytest.approx(ideal)
    assert flushed.bubble == pytest.approx(ideal)


@given(STAGES)
def test_receive_buffers_are_bounded_by_depth(stages: int) -> None:
    few, many = (verify(one_f_one_b(stages, count)).peak_buffers for count in (4 * stages, 64))
    assert few == many
    assert all(buffers <= stages - stage + 3 for stage, buffers in enumerate(many))
    assert max(verify(forward_only(stages, 64)).peak_buffers) <= 2


def damaged(schedule: Schedule, rank: int, instructions: list[Instruction]) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(instructions), *schedule.ranks[rank + 1 :]))


@given(SCHEDULES, st.data())
def test_a_dropped_instruction_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    instructions = list(schedule.ranks[rank])
    dropped = instructions.pop(data.draw(st.integers(0, len(instructions) - 1)))
    with pytest.raises(ScheduleError) as caught:
        verify(damaged(schedule, rank, instructions))
    assert caught.value.rank == rank
    assert str(dropped) in str(caught.value)


@given(SCHEDULES, st.data())
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


@given(SCHEDULES, st.data(), st.integers(0, 2**16))
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


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_messages_out_of_order_are_caught(generator: Generator) -> None:
    """What tags would repair on gloo and NCCL would silently mix up."""
    schedule = generator(2, 4)
    instructions = list(schedule.ranks[1])
    receives = [index for index, each in enumerate(instructions) if each.op is Op.RECV_ACTIVATION]
    first, second = receives[:2]
    instructions.insert(first, instructions.pop(second))
    order = [each for each in instructions if each.op is Op.RECV_ACTIVATION]
    assert [each.micro_batch for each in order] == [1, 0, 2, 3]
    with pytest.raises(ScheduleError, match="order differs"):
        verify(damaged(schedule, 1, instructions))


def test_a_deadlock_is_caught_and_named() -> None:
    """Each rank sends before it posts its receive: fine with buffered sends, a deadlock where sends wait."""
    late = []
    for instructions in one_f_one_b(2, 4).ranks:
        order = list(instructions)
        for index in range(len(order) - 2, -1, -1):
            if order[index].op in RECEIVES:
                receive = order.pop(index)
                compute = Op.FORWARD if receive.op is Op.RECV_ACTIVATION else Op.BACKWARD
                user = order.index(Instruction(compute, receive.stage, receive.micro_batch))
                order.insert(user, receive)
        late.append(tuple(order))
    with pytest.raises(ScheduleError, match=r"rank \d, instruction \d+: deadlock: .* waits for"):
        verify(replace(one_f_one_b(2, 4), ranks=tuple(late)))


def test_misplaced_instructions_are_named() -> None:
    schedule = one_f_one_b(2, 2)
    forward = Instruction(Op.FORWARD, 0, 0)
    with pytest.raises(ScheduleError, match="rank 1, instruction 0: forward of stage 0, micro-batch 0 does not belong"):
        verify(damaged(schedule, 1, [forward, *schedule.ranks[1]]))
    backwards = [*schedule.ranks[0]][::-1]
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 0: .* comes before"):
        verify(damaged(schedule, 0, backwards))


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
def test_empty_schedules_are_refused(stages: int, micro_batches: int) -> None:
    for generator in (*GENERATORS.values(), forward_only):
        with pytest.raises(ValueError, match="a schedule needs a stage and a micro-batch"):
            generator(stages, micro_batches)
