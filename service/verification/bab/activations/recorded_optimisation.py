"""Optimises the parameters of a batch of domains: directly, or on a CUDA device from a record.

Domains of small networks are bounded by thousands of small kernels, whose launches take longer than the work. One
record serves all batches of about one size: they are padded with copies of domains and with empty splits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from service.bounds.buffers import fits, overwrite, own_copy
from service.bounds.fused import Adam
from service.bounds.memory import MemoryBudget, is_out_of_memory, make_room
from service.bounds.replay import Memory, Plain, RecordCache, Recorded, Repeat
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DomainBatch, DualObjective, DualParameters
from service.verification.bab.settings import OptimiserSettings, RecordingSettings


def padded_size(count: int, least: int, finer_beyond: int) -> int:
    """Return the padded size of a batch, or history, of ``count``."""
    if count <= least:
        return least if count else 0
    size = 1 << (count - 1).bit_length()
    step = size if size <= finer_beyond else size // 8
    return -(-count // step) * step


class _MultiplierAdam:
    """Adam (Kingma and Ba, 2015) for the multipliers β, each at a rate of its own.

    A multiplier that would change its sign stops at the kink. All state is in tensors that stay in place.
    """

    def __init__(self, like: Tensor, settings: OptimiserSettings) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.count = torch.zeros(1, dtype=torch.int64, device=like.device)
        steps = torch.arange(1, settings.iterations + 1, dtype=torch.float64)
        (first, second), self.epsilon = settings.adam_decays, settings.adam_epsilon
        self.decays = first, second
        sizes = settings.multiplier_step * (1 - second**steps).sqrt() / (1 - first**steps) * settings.decay**steps
        self.sizes = sizes.to(like)

    def restart(self) -> None:
        for each in (self.first, self.second, self.count):
            each.zero_()

    def step(self, values: Tensor, gradient: Tensor, rates: Tensor) -> None:
        first, second = self.decays
        self.first.lerp_(gradient, 1 - first)
        self.second.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        moved = self.first / self.second.sqrt().add_(self.epsilon)
        moved.mul_(rates).mul_(self.sizes.index_select(0, self.count))
        torch.sub(values, moved, out=moved)
        values.copy_(moved.masked_fill_(values * moved < 0, 0))
        self.count += 1


class _DomainOptimiser:
    """Optimises batches of as many domains as the first, one after the other, in tensors that stay in place.

    ``stepping`` repeats an iteration, ``looking`` repeats the final evaluation of its result.
    """

    def __init__(
        self,
        objective: DualObjective,
        batch: DomainBatch,
        domains: Domains,
        settings: OptimiserSettings,
        repeats: tuple[Repeat, Repeat],
    ) -> None:
        self.objective, self.settings, self.batch = objective, settings, replace(batch, bounds={})
        self.boxes = objective.boxes(len(domains))
        self.stepping, self.looking = repeats
        self.moving = DualParameters(*(each.clone().requires_grad_() for each in DualParameters.of(domains).each))
        self.kept = DualParameters(*(each.clone() for each in DualParameters.of(domains).each))
        self.best = torch.where(batch.empty, torch.inf, domains.margin)
        self.slopes = Adam([self.moving.slopes], settings.slope_step, settings.decay)
        self.beta = _MultiplierAdam(domains.beta, settings)
        self.weights = Adam([self.moving.weights], settings.weight_step, settings.decay)

    def keep(self) -> None:
        """Copy the constants into separate tensors, so that :meth:`restart` may overwrite them."""
        self.batch = own_copy(self.batch)

    def takes(self, batch: DomainBatch) -> bool:
        """Return whether these domains have the same form."""
        return fits(replace(batch, bounds={}), self.batch)

    @torch.no_grad()
    def restart(self, batch: DomainBatch, domains: Domains) -> None:
        overwrite(replace(batch, bounds={}), self.batch)
        self.best.copy_(torch.where(batch.empty, torch.inf, domains.margin))
        for new, moving, kept in zip(DualParameters.of(domains).each, self.moving.each, self.kept.each, strict=True):
            moving.copy_(new)
            kept.copy_(new)
        for each in (self.slopes, self.beta, self.weights):
            each.restart()

    @torch.no_grad()
    def run(self, domains: Domains) -> Domains:
        """Return the domains with the best margins found, never less than before, and their parameters."""
        self._optimise()
        slopes, beta, weights = (each.clone() for each in self.kept.each)
        return domains.with_(margin=self.best.clone(), slopes=slopes, beta=beta, weights=weights)

    def _optimise(self) -> None:
        total, every = self.settings.iterations, self.settings.check_every
        for done in range(0, total, every):
            before = self.best.clone()
            self.stepping.run(self._step, min(every, total - done))
            if bool((self.best > 0).all()):
                return
            if self.objective.is_alone and self._is_to_end(before, total - done - every):
                break
        self.looking.run(self._look, 1)

    def _is_to_end(self, before: Tensor, left: int) -> bool:
        """Return whether the time is over, or whether a domain would stay open if its margin went on to rise as from
        ``before`` for the iterations that are ``left``: mostly it rises ever less.
        """
        now = time.monotonic()
        if now > self.settings.deadline or now <= self.settings.doubts_after:
            return now > self.settings.deadline
        rise = (self.best - before) * (max(left, 0) / self.settings.check_every)
        return bool((self.best + rise <= 0).any())

    def _step(self) -> None:
        with torch.enable_grad():
            margin = self.objective.margins(self.batch, self.boxes, self.moving)
            gradients = self.objective.descent(self.batch, margin, self.moving)
        self._keep_best(margin.detach())
        _descend(self.slopes, self.moving.slopes, gradients.slopes)
        self.beta.step(self.moving.beta.detach(), gradients.beta, self.batch.scale)
        if self.objective.has_weights(self.batch):
            _descend(self.weights, self.moving.weights, gradients.weights)
            self.objective.project(self.batch, self.moving.weights.detach())

    def _look(self) -> None:
        self._keep_best(self.objective.margins(self.batch, self.boxes, self.moving))

    def _keep_best(self, margin: Tensor) -> None:
        better = margin > self.best
        torch.where(better, margin, self.best, out=self.best)
        for new, old in zip(self.moving.each, self.kept.each, strict=True):
            torch.where(better[:, None], new.detach(), old, out=old)


def _descend(adam: Adam, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient
    adam.step()
    parameter.grad = None  # a record would hold it for good


@dataclass(eq=False)
class DirectOptimisation:
    """Optimises every batch by itself."""

    objective: DualObjective

    def optimise(self, domains: Domains, settings: OptimiserSettings, scale: Tensor) -> Domains:
        batch = self.objective.batch_of(domains, scale)
        return _DomainOptimiser(self.objective, batch, domains, settings, (Plain(), Plain())).run(domains)

    @property
    def held(self) -> int:
        """Return the bytes that seem free but are not."""
        return 0

    def forget(self) -> None:
        """Free everything kept for speed alone."""


class _Size(NamedTuple):
    domains: int
    splits: int
    settings: OptimiserSettings


@dataclass(eq=False)
class RecordedOptimisation:
    """Batches of one size share a record; the least recently used records are dropped first.

    ``cost`` is the bytes of a domain, ``free`` returns the free bytes. ``repeat`` makes a repeatable iteration
    in some memory. ``settings`` tune the records, not the optimisation.
    """

    objective: DualObjective
    cost: int
    free: Callable[[], int]
    repeat: InitVar[Callable[[Memory], Repeat]]
    settings: RecordingSettings = field(default_factory=RecordingSettings)
    _kept: RecordCache[_Size, _DomainOptimiser] = field(init=False)

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
        count = padded_size(len(domains), self.settings.smallest_batch, finer)
        size = _Size(count, padded_size(domains.depth, self.settings.fewest_splits, finer), settings)
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
        whole = domains.pad(size.domains, size.splits)
        found = self._optimiser(size, whole, scale).run(whole)
        return found.rows(slice(len(domains))).cut(domains.depth)

    def _optimiser(self, size: _Size, domains: Domains, scale: Tensor) -> _DomainOptimiser:
        """Return an optimiser that is ready to run, and mark it as the most recently used."""
        batch = self.objective.batch_of(domains, scale)
        optimiser = self._kept.take(size)
        if optimiser is not None and optimiser.takes(batch):
            optimiser.settings = size.settings
            optimiser.restart(batch, domains)
        else:
            repeats = self._kept.repeater(), self._kept.repeater()
            optimiser = _DomainOptimiser(self.objective, batch, domains, size.settings, repeats)
            optimiser.keep()
        self._kept.keep(size, optimiser)
        return optimiser

    def _has_room(self, size: _Size) -> bool:
        """Return whether there is memory for one more record, perhaps after others were dropped."""
        held, need = sum(each.domains for each in self._kept) * self.cost, size.domains * self.cost
        limit = (self.free() - self.held + held) // self.settings.memory_divisor
        if need > min(limit, self.settings.largest_bytes):
            return False
        while held + need > limit:
            held -= self._kept.drop_oldest().domains * self.cost
        return True
