"""Computes when each computation of a pipeline runs if stages are equal and transfers take no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.schedules.schedule import BACKWARDS, Instruction, Op, ScheduleError

# The gradients of inputs and of weights are about one forward each: two matrix products instead of one.
_DURATION = {
    Op.FORWARD: 1.0,
    Op.BACKWARD: 2.0,
    Op.BACKWARD_INPUT: 1.0,
    Op.BACKWARD_WEIGHT: 1.0,
}


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
