"""Records the splits of a search over activations, entry by entry, for its display."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import IBP
from service.bounds.split import Preactivations
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.decision import Technique
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Counterexample, Specification
from service.verification.bab.split_tree import SearchTree


@dataclass(frozen=True, eq=False)
class RecordedSplits:
    """The ``tree`` of one search, whose roots are the disjuncts of its specification."""

    model: ModelUnderVerification
    specification: Specification
    tree: SearchTree

    @classmethod
    def of(cls, model: ModelUnderVerification, asked: Specification, bounds: DomainBounds) -> RecordedSplits:
        def name(number: int) -> str:
            return _name_of(model, bounds.preactivations, number)

        return cls(model, asked, model.splits.begin(Technique.ACTIVATIONS.value, name))

    def plant_roots(self, roots: Domains) -> Domains:
        """Return the roots with their places in the tree."""
        return roots.with_(node=self.tree.plant(roots.margin))

    def record_halves(self, halves: Domains) -> Domains:
        """Return the halves of split domains, first all of one side, with their places in the tree."""
        if not len(halves):
            return halves
        count = len(halves) // 2
        upper = halves.rows(slice(count))
        node = self.tree.split(upper.node, upper.index[:, -1], upper.at[:, -1], halves.margin.view(2, count))
        return halves.with_(node=node.flatten())

    def mark(self, counterexample: Counterexample) -> None:
        """Mark the leaf of a counterexample, where this rank has the whole model."""
        if not self.tree.nodes or not self.model.engine.is_alone:
            return
        exact = torch.tensor([counterexample], dtype=torch.float64, device=self.model.device)
        excess = self.specification.excess(self.model.float64_module(exact), exact)
        disjuncts = (self.specification.per_disjunct(excess)[0] <= 0).nonzero().flatten().tolist()
        self.tree.mark(self._values_at(exact), disjuncts)

    def _values_at(self, x: Tensor) -> list[float]:
        """Return the values of all preactivations at one input ``(1, features)``."""
        engine = self.model.engine
        analysis = engine.analyse(IBP, Interval.point(x.to(self.model.dtype)), self.model.options)
        values: list[float] = Preactivations.of(engine.network).bounds(analysis.inputs).centre[0].tolist()
        return values


def _name_of(model: ModelUnderVerification, preactivations: Preactivations, number: int) -> str:
    """Return the name of an entry: the layer that reads it, as the model's file calls it, and its place there.

    For a model that several ranks have together, it is a number.
    """
    if not model.engine.is_alone:
        return f"neuron {number}"
    for preactivation in preactivations.each:
        if number < preactivation.offset + preactivation.size:
            node = model.network.nodes[preactivation.reader]
            return f"{node.source or node.name} [{number - preactivation.offset}]"
    raise ValueError(f"the network has {preactivations.entries} entries, not one numbered {number}")
