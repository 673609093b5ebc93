"""Optimises bounds of hidden values before anything is split, each for itself (α-CROWN, Xu et al., 2021).

All domains of a search relax on these bounds. Only entries that would tighten a relaxation are bounded, layer by layer,
by as many iterations as the remaining time allows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods.alpha import both_optimised
from service.bounds.methods.layers import bound_layers, one_pass
from service.bounds.network import Network
from service.bounds.options import BoundOptions
from service.bounds.split import Preactivation, Preactivations
from service.verification.bab.settings import SearchSettings


@torch.no_grad()
def optimise_intermediate_bounds(
    network: Network,
    box: Interval,
    bounds: Interval,
    deadline: float,
    options: BoundOptions,
    *,
    settings: SearchSettings,
) -> Interval:
    """Return ``bounds`` ``(1, entries)`` of all preactivations, tightened until about ``deadline``
    (``time.monotonic``).
    """
    preactivations = Preactivations.of(network)
    known = {preactivation.value: _part(bounds, preactivation) for preactivation in preactivations.each}
    unstable = {
        preactivation.value: unstable_entries(network, bounds, preactivation) for preactivation in preactivations.each
    }
    refine = _OptimisedBounds(known, unstable, deadline, settings)
    analysis = bound_layers(network, box, options.within(box.lower.device), refine)
    found = {
        preactivation.value: analysis.intervals[preactivation.value].map(lambda end: end.flatten(1))
        for preactivation in preactivations.each
    }
    ends = (
        torch.cat([getattr(found[preactivation.value], side) for preactivation in preactivations.each], dim=1)
        for side in ("lower", "upper")
    )
    return bounds.meet(Interval(*ends))


def _part(bounds: Interval, preactivation: Preactivation) -> Interval:
    return bounds.arranged(lambda end: end[:, preactivation.offset : preactivation.offset + preactivation.size])


def unstable_entries(network: Network, bounds: Interval, preactivation: Preactivation) -> Tensor:
    """Return which entries ``(size,)`` of a preactivation are unstable: tighter bounds would tighten a relaxation."""
    preactivations = Preactivations.of(network)
    lower, upper = preactivations.unflattened(bounds.lower), preactivations.unflattened(bounds.upper)
    unstable = torch.zeros_like(lower[preactivation.value], dtype=torch.bool)
    for node in network.nonlinear:
        if preactivation.value in node.inputs:
            known = [Interval(lower[name], upper[name]) for name in node.inputs]
            masks = network.operator_of(node).unstable_on(node, known)
            for name, mask in zip(node.inputs, masks, strict=True):
                if name == preactivation.value:
                    unstable |= mask
    return unstable.flatten()


@dataclass(frozen=True, eq=False)
class _OptimisedBounds:
    """A :data:`~service.bounds.methods.layers.Refine` of one box, by value: what is known, and which entries are
    unstable.
    """

    known: Mapping[str, Interval]
    unstable: Mapping[str, Tensor]
    deadline: float
    settings: SearchSettings

    def __call__(self, backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
        before = self.known[name].arranged(lambda end: end.gather(1, index))
        (place,) = self.unstable[name][index[0]].nonzero(as_tuple=True)
        if not len(place):
            return before
        found = self._bounded(backward, name, index[:, place], options)
        lower, upper = before.lower.clone(), before.upper.clone()
        lower[:, place], upper[:, place] = found.lower, found.upper
        return before.meet(Interval(lower, upper))

    def _bounded(self, backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
        started = time.monotonic()
        plain = one_pass(backward, name, index, options)
        bool(plain.lower.isfinite().all())  # a device answers when it is done
        now = time.monotonic()
        affordable = self.settings.time.iterations_for_layer(self.deadline - now, now - started)
        iterations = min(options.ascent.iterations, affordable)
        if iterations < self.settings.activations.intermediate.fewest_iterations:
            return plain
        options = replace(options, ascent=replace(options.ascent, iterations=iterations))
        return plain.meet(both_optimised(backward, name, index, options))
