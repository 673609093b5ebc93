"""Schedules: what each rank of a pipeline does, in order, as plain data. Nothing here knows of torch.

A schedule is written as the order of computations per rank; :func:`lower` adds the communication. Stages are
virtual: a rank may own several, so that a schedule with more stages than ranks is one more function like those below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an instruction does for ``stage``: sends go to, and receives come from, the neighbour that the name implies.

    Activations move from stage s to s + 1, gradients from s to s - 1.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"
    RECV_GRADIENT = "recv_gradient"


@dataclass(frozen=True, slots=True)
class Instruction:
    op: Op
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op} of stage {self.stage}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Instructions per rank. ``owners[s]`` is the rank of stage s; without ``trains`` there are forwards only."""

    name: str
    micro_batches: int
    owners: tuple[int, ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    trains: bool = True

    @property
    def stages(self) -> int:
        return len(self.owners)

    def is_local(self, boundary: int) -> bool:
        """Whether stages ``boundary`` and ``boundary + 1`` are on one rank, so that nothing is sent."""
        return self.owners[boundary] == self.owners[boundary + 1]


Generator = Callable[[int, int], Schedule]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019). Keeps the activations of every micro-batch."""
    _check(stages, micro_batches)
    every = range(micro_batches)
    orders = [
        [Instruction(op, stage, each) for op in (Op.FORWARD, Op.BACKWARD) for each in every] for stage in range(stages)
    ]
    return lower("gpipe", micro_batches, tuple(range(stages)), orders)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward after a warm-up (PipeDream-Flush, Narayanan et al., 2021).

    Stage s keeps the activations of at most ``stages - s`` micro-batches.
    """
    _check(stages, micro_batches)
    orders = [_one_f_one_b_order(stage, stages - stage - 1, micro_batches) for stage in range(stages)]
    return lower("1f1b", micro_batches, tuple(range(stages)), orders)


def forward_only(stages: int, micro_batches: int) -> Schedule:
    """Evaluation: every micro-batch forward once; nothing is kept."""
    _check(stages, micro_batches)
    orders = [[Instruction(Op.FORWARD, stage, each) for each in range(micro_batches)] for stage in range(stages)]
    return lower("forward_only", micro_batches, tuple(range(stages)), orders, trains=False)


GENERATORS: dict[str, Generator] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def _one_f_one_b_order(stage: int, warm_up: int, micro_batches: int) -> list[Instruction]:
    ahead = min(warm_up, micro_batches)
    order = [Instruction(Op.FORWARD, stage, each) for each in range(ahead)]
    for each in range(micro_batches):
        if each + ahead < micro_batches:
            order.append(Instruction(Op.FORWARD, stage, each + ahead))
        order.append(Instruction(Op.BACKWARD, stage, each))
    return order


def lower(
    name: str,
    micro_batches: int,
    owners: tuple[int, ...],
    orders: Sequence[Sequence[Instruction]],
    *,
    trains: bool = True,
    ahead: int = 1,
) -> Schedule:
    """Add sends and receives to the computations of each rank.

    A receive is posted ``ahead`` computations before the one that needs it: its transfer overlaps them, and where
    both sides of a boundary post their receives before either sends, not even sends that wait for their receiver
    can deadlock (one is enough for ours; stages in a loop may need more). The price is as many more receive buffers.
    """
    ranks = []
    for order in orders:
        posted = [receive for compute in order[:ahead] for receive in _receives(compute, owners)]
        for index, compute in enumerate(order):
            for later in order[index + ahead : index + ahead + 1]:
                posted += _receives(later, owners)
            posted += [compute, *_sends(compute, owners)]
        ranks.append(tuple(posted))
    return Schedule(name, micro_batches, owners, tuple(ranks), trains)


def _receives(compute: Instruction, owners: tuple[int, ...]) -> Iterator[Instruction]:
    stage, last = compute.stage, len(owners) - 1
    if compute.op is Op.FORWARD and stage > 0 and owners[stage - 1] != owners[stage]:
        yield Instruction(Op.RECV_ACTIVATION, stage, compute.micro_batch)
    if compute.op is Op.BACKWARD and stage < last and owners[stage + 1] != owners[stage]:
        yield Instruction(Op.RECV_GRADIENT, stage, compute.micro_batch)


def _sends(compute: Instruction, owners: tuple[int, ...]) -> Iterator[Instruction]:
    stage, last = compute.stage, len(owners) - 1
    if compute.op is Op.FORWARD and stage < last and owners[stage + 1] != owners[stage]:
        yield Instruction(Op.SEND_ACTIVATION, stage, compute.micro_batch)
    if compute.op is Op.BACKWARD and stage > 0 and owners[stage - 1] != owners[stage]:
        yield Instruction(Op.SEND_GRADIENT, stage, compute.micro_batch)


def _check(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"a schedule needs a stage and a micro-batch, not stages={stages}, {micro_batches=}")
