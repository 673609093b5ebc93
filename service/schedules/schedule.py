"""Defines schedules as plain data: the instructions of each pipeline rank, in order. Nothing here knows of torch.

A schedule is written as the order of computations per rank; :func:`service.schedules.generator.lower` adds the rest.
Stages are virtual: a rank may own several.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an instruction does for ``stage``: sends go to, and receives come from, the neighbour that the name implies.

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
    """The instructions of each rank. ``owners[s]`` is the rank of stage s; without ``trains`` there are only
    forwards.
    """

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
