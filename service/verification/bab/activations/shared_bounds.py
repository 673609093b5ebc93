"""The bounds of preactivations that all domains of a search over activations share, and that it tightens as it goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

from service.bounds.interval import Interval
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.dual_objective import DisjunctRows
from service.verification.bab.activations.intermediate_bab import after_relaxations, refine_intermediate_bounds
from service.verification.bab.activations.intermediate_bounds import optimise_intermediate_bounds, unstable_entries
from service.verification.bab.invprop import Invprop
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.shared_work import SharedWork


@dataclass(eq=False)
class SharedBounds:
    """``bounds`` ``(1, entries)``, equal on all ranks of the search, which tighten them together.

    ``deadline`` is that of the search. Bounds are ``is_hurried`` until they have been optimised to the end.
    """

    model: ModelUnderVerification
    domain_bounds: DomainBounds
    specification_rows: DisjunctRows
    bounds: Interval
    deadline: float
    is_optimised: bool = False
    is_hurried: bool = True

    @cached_property
    def work(self) -> SharedWork:
        return SharedWork(self.model.search_group, self.model.device, self.model.engine.survives)

    @cached_property
    def invprop(self) -> Invprop:
        settings = self.model.settings.activations
        optimiser = settings.invprop.optimiser.within(self.model.options, self.deadline)
        objective, memory = self.domain_bounds.objective, self.model.memory
        return Invprop(
            objective,
            self.specification_rows,
            replace(settings.invprop, optimiser=optimiser),
            memory,
            settings.domain_bounds,
            work=self.work,
        )

    def count_inexact_relaxations(self) -> int:
        """Count the values with an inexact relaxation."""
        network = self.domain_bounds.network
        return sum(
            int(unstable_entries(network, self.bounds, preactivation).sum())
            for preactivation in after_relaxations(network)
        )

    def tighter(self, seconds: float, until: float) -> Interval:
        """Return tighter bounds: optimised the first time, by branch and bound later, in a search that took
        ``seconds``, and whose turn ends at ``until``.
        """
        now, model, plan = time.monotonic(), self.model, self.model.settings.time
        network, box, bounds = self.domain_bounds.network, self.domain_bounds.box, self.bounds
        if not self.is_optimised:
            self.is_optimised = True
            end = plan.optimising_deadline(now, until, self.deadline)
            found = optimise_intermediate_bounds(
                network, box, bounds, end, model.options, settings=model.settings, work=self.work
            )
            self.is_hurried = time.monotonic() > end
            return found
        end, scores = plan.refinement_deadline(now, until, seconds), model.heuristics.activations
        settings = model.settings.activations
        return refine_intermediate_bounds(
            network, box, bounds, end, model.options, scores=scores, settings=settings, work=self.work
        )
