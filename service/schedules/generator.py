"""Says what a schedule is made of: a name, an order of computations for each rank, and how many stages a rank has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.schedules.lowering import lower
from service.schedules.schedule import Instruction, Schedule, check_sizes, loop

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
        """Return the schedule of ``pp`` ranks; raises ``ValueError`` for sizes that it does not have."""
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
