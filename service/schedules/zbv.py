"""Two stages per rank in a V, with the backward split (ZB-V, Qi et al., 2024, "controllable memory")."""

from __future__ import annotations

from collections import Counter

from service.schedules.schedule import Generator, Instruction, Op, vee


def _orders(pp: int, virtual_stages: int, micro_batches: int) -> list[list[Instruction]]:
    """Order a full pipeline; of fewer micro-batches, keep those that exist."""
    full = max(2 * pp - 1, micro_batches)
    orders = [_Order(rank, pp).all(full) for rank in range(pp)]
    return [[step for step in order if step.micro_batch < micro_batches] for order in orders]


class _Order:
    """Writes down one rank's computations; each kind takes the micro-batches of a stage in turn."""

    def __init__(self, rank: int, pp: int) -> None:
        self.down, self.up = rank, 2 * pp - 1 - rank
        self.rank, self.rest = rank, pp - rank
        self.order: list[Instruction] = []
        self.count: Counter[tuple[Op, int]] = Counter()

    def all(self, micro_batches: int) -> list[Instruction]:
        self._warm_up()
        while self.count[Op.FORWARD, self.up] < micro_batches:
            if self.count[Op.FORWARD, self.down] < micro_batches:
                self._add(Op.FORWARD, self.down)
            self._backward(self.down)
            self._add(Op.FORWARD, self.up)
            self._backward(self.up)
        self._cool_down(micro_batches)
        return self.order

    def _warm_up(self) -> None:
        for _ in range(2 * self.rest - 1):
            self._add(Op.FORWARD, self.down)
        for _ in range(self.rank):
            self._add(Op.FORWARD, self.up)
            self._add(Op.FORWARD, self.down)
        for _ in range(self.rest):
            self._add(Op.FORWARD, self.up)
            self._backward(self.up)

    def _cool_down(self, micro_batches: int) -> None:
        for _ in range(self.rank):
            self._add(Op.BACKWARD_INPUT, self.down)
            self._add(Op.BACKWARD_INPUT, self.up)
        for _ in range(self.rest):
            self._backward(self.down)
        for stage in (self.up, self.down):
            while self.count[Op.BACKWARD_WEIGHT, stage] < micro_batches:
                self._add(Op.BACKWARD_WEIGHT, stage)

    def _backward(self, stage: int) -> None:
        self._add(Op.BACKWARD_INPUT, stage)
        self._add(Op.BACKWARD_WEIGHT, stage)

    def _add(self, op: Op, stage: int) -> None:
        self.order.append(Instruction(op, stage, self.count[op, stage]))
        self.count[op, stage] += 1


ZBV = Generator("zbv", _orders, vee, stages_per_rank=2)
"""Idle for pp - 1 half-stage forwards from 2·pp - 1 micro-batches on, at the peak memory of 1F1B's first rank.

The last stage is on the first rank, so backwards start as soon as forwards are back, and every rank keeps 2·pp
half-sized activations.
"""
