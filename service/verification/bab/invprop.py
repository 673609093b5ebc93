"""Bounds of hidden values at the inputs where a property fails (INVPROP, Kotha et al., 2023).

A counterexample of a disjunct has all of its rows at most at their thresholds, so that any γ ≥ 0 bounds a hidden value
there by z ≥ min (z + γ·(row·y − threshold)), one pass from the output with z added on the way. The closer a search is
to a proof, the fewer inputs are left and the tighter these bounds: they are repeated as long as that gains. If
the ends of a value cross, there is no counterexample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import UNLIMITED, MemoryBudget
from service.bounds.split import Preactivation
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DisjunctRows, DomainBatch, DualObjective
from service.verification.bab.activations.intermediate_bab import after_relaxations
from service.verification.bab.activations.intermediate_bounds import unstable_entries
from service.verification.bab.activations.neuron_index import LocalSplits
from service.verification.bab.settings import DomainBoundsSettings, EntryBatchSettings, InvpropSettings
from service.verification.bab.shared_work import SharedWork


class _InvpropObjective(DualObjective):
    """Ends of hidden values, each a domain of its own, over the inputs where a disjunct of the specification holds.

    A domain's ``disjunct`` is the :meth:`number` of an end; its weights are the γ of the rows, any numbers ≥ 0, in
    units in which 1 is large: ``lacking`` ``(disjuncts,)`` is the missing margin of the whole box.
    """

    def __init__(self, objective: DualObjective, specification_rows: DisjunctRows, pressure: float) -> None:
        super().__init__(objective.network, objective.box, objective.bounds, specification_rows)
        self.used, self.pressure = specification_rows.used, pressure
        self.lacking = objective.bounds.lower.new_ones(len(specification_rows.used))

    def number(self, disjunct: int, entry: Tensor, sign: int) -> Tensor:
        """Number the lower ends of entries (``sign`` 1), or their upper ends (−1), whose negatives are bounded."""
        return (2 * disjunct + (sign < 0)) * self.preactivations.entries + entry

    def batch_of(self, domains: Domains, scale: Tensor) -> DomainBatch:
        side, entry = (
            domains.disjunct // self.preactivations.entries,
            domains.disjunct[:, None] % self.preactivations.entries,
        )
        disjunct, sign = side // 2, 1 - 2 * (side % 2)  # as number() has it
        batch = super().batch_of(domains.with_(disjunct=disjunct), scale)
        width = self.known(disjunct).width.expand(len(entry), -1).gather(1, entry)
        unit = self.pressure * width / self.lacking[disjunct, None]
        return replace(
            batch,
            rows=batch.rows * unit[:, :, None],
            offsets=batch.offsets * unit,
            own=LocalSplits(entry, sign.to(width)[:, None]),
        )

    @staticmethod
    def combine_rows(batch: DomainBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(weights[:, None], batch.rows), (weights * batch.offsets).sum(dim=1)

    def has_weights(self, batch: DomainBatch) -> bool:
        return True

    def project(self, batch: DomainBatch, weights: Tensor) -> None:
        weights.mul_(batch.used).clamp_(min=0)


class Invprop:
    """Tightens the bounds of hidden values for the disjuncts of ``objective``, which takes the results.

    All ranks that share the ``work`` call the same methods in the same order.
    """

    def __init__(
        self,
        objective: DualObjective,
        specification_rows: DisjunctRows,
        settings: InvpropSettings,
        memory: MemoryBudget = UNLIMITED,
        domain_bounds: DomainBoundsSettings | None = None,
        *,
        work: SharedWork | None = None,
    ) -> None:
        self.objective, self.settings, self.work = objective, settings, work or SharedWork()
        self.failing = _InvpropObjective(objective, specification_rows, settings.pressure)
        self.domain_bounds = DomainBounds(self.failing, memory, domain_bounds)
        self.preactivations: Sequence[Preactivation] = after_relaxations(objective.network)[::-1]
        """The last layers gain most, and their gains help the others."""

    @torch.no_grad()
    def tighten(
        self, disjunct: int, margin: float, preactivations: Sequence[Preactivation], deadline: float
    ) -> Sequence[Preactivation] | None:
        """Return the preactivations that gained; ``None`` if there is no counterexample.

        ``margin`` is that of the whole box. Bounds for which the time does not suffice stay as they are.
        """
        self.failing.lacking[disjunct] = max(-margin, self.settings.least_lacking)
        gained = []
        for preactivation in preactivations:
            if self.work.late(deadline):
                break
            before = self._bounds(disjunct)
            entries = preactivation.offset + unstable_entries(
                self.objective.network, before, preactivation
            ).nonzero().squeeze(1)
            own = self.work.own(entries)
            after = self.work.tightest(partial(self._of_entries, disjunct, own, before, deadline), before)
            if bool(self.objective.empty(after)):
                return None
            self._take(disjunct, after.meet(after))
            if _total(after, entries) < (1 - self.settings.least_layer_gain) * _total(before, entries):
                gained.append(preactivation)
        return gained

    def _bounds(self, disjunct: int) -> Interval:
        return self.objective.known(torch.tensor([disjunct], device=self.failing.lacking.device))

    def _take(self, disjunct: int, bounds: Interval) -> None:
        count = len(self.failing.lacking)
        lower, upper = (
            end.expand(count, -1).clone() for end in (self.objective.bounds.lower, self.objective.bounds.upper)
        )
        lower[disjunct], upper[disjunct] = bounds.lower[0], bounds.upper[0]
        both = Interval(lower, upper)
        self.objective.tighten(both)
        self.failing.tighten(both)

    def _of_entries(self, disjunct: int, entries: Tensor, bounds: Interval, deadline: float) -> Interval:
        """Return ``bounds`` ``(1, entries)`` of all preactivations with better ends of some entries."""
        lower, upper = bounds.lower.clone(), bounds.upper.clone()
        for part in _parts(entries, deadline, self.settings.batches):
            ends = self._ends(disjunct, part, bounds)
            found = self._margins(ends)
            known = torch.where(found.isfinite(), found, ends.margin)
            lower[0, part], upper[0, part] = known[: len(part)], -known[len(part) :]
        return Interval(lower, upper)

    def _margins(self, ends: Domains) -> Tensor:
        parts = self.domain_bounds.in_parts(
            len(ends),
            self.domain_bounds.capacity,
            lambda part: self.domain_bounds.optimise(ends.rows(part), self.settings.optimiser).margin,
        )
        return torch.cat(parts)

    def _ends(self, disjunct: int, entries: Tensor, bounds: Interval) -> Domains:
        """Return one domain for each lower end, and then for each upper end."""
        roots = self.domain_bounds.roots(torch.zeros_like(self.failing.used, dtype=bounds.lower.dtype))
        ends = roots.rows(torch.full((2 * len(entries),), disjunct, device=entries.device))
        numbers = [self.failing.number(disjunct, entries, sign) for sign in (1, -1)]
        known = torch.cat([bounds.lower[0, entries], -bounds.upper[0, entries]])
        return ends.with_(margin=known, disjunct=torch.cat(numbers), weights=torch.zeros_like(ends.weights))


def _total(bounds: Interval, entries: Tensor) -> float:
    return float(bounds.width[0, entries].sum())


def _parts(entries: Tensor, deadline: float, batches: EntryBatchSettings) -> Iterator[Tensor]:
    """Yield the entries batch by batch until ``deadline`` (``time.monotonic``)."""
    done, count = 0, batches.first(entries.is_cuda)
    while done < len(entries) and (now := time.monotonic()) < deadline:
        yield entries[done : done + count]
        done += count
        count = batches.after(count, time.monotonic() - now)
