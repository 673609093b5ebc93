"""Optimises the parameters of a batch of domains: as written, or on a CUDA device from a record.

Domains of small networks are bounded by thousands of small kernels, whose launches take longer than the work. One
record serves all batches of about one size: they are padded with copies of domains and with empty splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from service.bounds.memory import MemoryBudget, is_out_of_memory, make_room
from service.bounds.replay import Memory, Plain, RecordCache, Recorded, Repeat
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DualObjective
from service.verification.bab.activations.optimiser import DomainOptimiser
from service.verification.bab.settings import OptimiserSettings, RecordingSettings


def filled(count: int, least: int, finer_beyond: int) -> int:
    """Return the padded size of a batch, or history, of ``count``."""
    if count <= least:
        return least if count else 0
    size = 1 << (count - 1).bit_length()
    step = size if size <= finer_beyond else size // 8
    return -(-count // step) * step


@dataclass(eq=False)
class DirectOptimisation:
    """Optimises every batch by itself."""

    objective: DualObjective

    def optimise(self, domains: Domains, settings: OptimiserSettings, scale: Tensor) -> Domains:
        batch = self.objective.batch_of(domains, scale)
        return DomainOptimiser(self.objective, batch, domains, settings, (Plain(), Plain())).run(domains)

    @property
    def held(self) -> int:
        """Return the bytes that seem free and are not."""
        return 0

    def forget(self) -> None:
        """Free everything kept for speed alone."""


@dataclass(frozen=True)
class _Size:
    count: int
    depth: int
    settings: OptimiserSettings


@dataclass(eq=False)
class RecordedOptimisation:
    """Batches of one size share a record; those that were not used for longest make room for others.

    ``cost`` are the bytes that a domain takes, ``free`` tells those that there are. ``repeat`` makes what repeats an
    iteration in some memory. ``settings`` tune the records, not the optimisation.
    """

    objective: DualObjective
    cost: int
    free: Callable[[], int]
    repeat: InitVar[Callable[[Memory], Repeat]]
    settings: RecordingSettings = field(default_factory=RecordingSettings)
    _kept: RecordCache[_Size, DomainOptimiser] = field(init=False)

    def __post_init__(self, repeat: Callable[[Memory], Repeat]) -> None:
        self._kept = RecordCache(repeat, self.settings.most)

    @classmethod
    def on(
        cls,
        device: torch.device,
        objective: DualObjective,
        cost: int,
        budget: MemoryBudget,
        settings: RecordingSettings,
    ) -> RecordedOptimisation:
        return cls(objective, cost, lambda: budget.free(device), lambda memory: Recorded(device, memory), settings)

    @property
    def held(self) -> int:
        return self._kept.memory.bytes

    def forget(self) -> None:
        self._kept.clear()

    def optimise(self, domains: Domains, settings: OptimiserSettings, scale: Tensor) -> Domains:
        finer = self.settings.finer_beyond
        count = filled(len(domains), self.settings.smallest_batch, finer)
        size = _Size(count, filled(domains.depth, self.settings.fewest_splits, finer), settings)
        if size in self._kept or self._has_room(size):
            try:
                return self._from_record(size, domains, scale)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self.forget()
            make_room(domains.margin.device)
        return DirectOptimisation(self.objective).optimise(domains, settings, scale)

    def _from_record(self, size: _Size, domains: Domains, scale: Tensor) -> Domains:
        whole = domains.filled(size.count, size.depth)
        found = self._optimiser(size, whole, scale).run(whole)
        return found.rows(slice(len(domains))).cut(domains.depth)

    def _optimiser(self, size: _Size, domains: Domains, scale: Tensor) -> DomainOptimiser:
        """Return an optimiser that is ready to run, and mark it as the last used."""
        batch = self.objective.batch_of(domains, scale)
        optimiser = self._kept.take(size)
        if optimiser is not None and optimiser.takes(batch):
            optimiser.restart(batch, domains)
        else:
            repeats = self._kept.repeater(), self._kept.repeater()
            optimiser = DomainOptimiser(self.objective, batch, domains, size.settings, repeats)
            optimiser.keep()
        self._kept.keep(size, optimiser)
        return optimiser

    def _has_room(self, size: _Size) -> bool:
        """Return whether there is memory for one more record, perhaps after others were dropped."""
        held, need = sum(each.count for each in self._kept) * self.cost, size.count * self.cost
        limit = (self.free() - self.held + held) // self.settings.memory_divisor
        if need > min(limit, self.settings.largest_bytes):
            return False
        while held + need > limit:
            held -= self._kept.drop_oldest().count * self.cost
        return True
