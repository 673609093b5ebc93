"""Bounds the whole box of a search over activations, and optimises each bound of a hidden value by itself
before anything is split (α-CROWN, Xu et al., 2021).

All domains of a search relax on these bounds. Only entries that would tighten a relaxation are bounded, layer by layer,
by as many iterations as the remaining time allows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.memory import MemoryShortageError
from service.bounds.methods import ALPHA_CROWN, CROWN, Analysis, IntermediateBounds, Method
from service.bounds.methods.alpha import both_optimised
from service.bounds.methods.layers import bound_layers, one_pass
from service.bounds.network import Network
from service.bounds.options import BoundOptions
from service.bounds.progress import OutOfTimeError
from service.bounds.rank_group import RankGroup
from service.bounds.split import Preactivation, Preactivations
from service.verification.bab.activations.dual_objective import DisjunctRows
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import SearchSettings
from service.verification.bab.shared_work import SharedWork
from service.verification.bab.specification import Specification


@torch.no_grad()
def optimise_intermediate_bounds(
    network: Network,
    box: Interval,
    bounds: Interval,
    deadline: float,
    options: BoundOptions,
    *,
    settings: SearchSettings,
    work: SharedWork | None = None,
) -> Interval:
    """Return ``bounds`` ``(1, entries)`` of all preactivations, tightened until about ``deadline``
    (``time.monotonic``), by all ranks that share the ``work``.
    """
    work, layers = work or SharedWork(), list(Preactivations.of(network).each)
    # Ranks that divide a layer need all of it for the next one; one rank alone goes through all layers once.
    for step in [[layer] for layer in layers] if work.is_divided else [layers]:
        own = {layer.value: _own_entries(network, bounds, layer, work) for layer in step}
        refine = _OptimisedBounds(network, bounds, own, deadline, settings)
        found = work.tightest(partial(_optimise_entries, network, box, refine, options), bounds)
        bounds = bounds.meet(found)
    return bounds


def _own_entries(network: Network, bounds: Interval, preactivation: Preactivation, work: SharedWork) -> Tensor:
    """Return the unstable entries ``(size,)`` that this rank bounds."""
    unstable = unstable_entries(network, bounds, preactivation)
    own = torch.zeros_like(unstable)
    own[work.own(unstable.nonzero().squeeze(1))] = True
    return own


def _optimise_entries(network: Network, box: Interval, refine: _OptimisedBounds, options: BoundOptions) -> Interval:
    """Return bounds of all preactivations, as ``refine`` tightens them."""
    analysis = bound_layers(network, box, options.within(box.lower.device), refine)
    found = [analysis.intervals[layer.value].map(by_instance) for layer in Preactivations.of(network).each]
    return Interval(torch.cat([each.lower for each in found], dim=1), torch.cat([each.upper for each in found], dim=1))


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
    """A :data:`~service.bounds.methods.layers.Refine` of one box: ``known`` bounds ``(1, entries)`` of all
    preactivations, and those of its entries that are ``unstable``, by value.
    """

    network: Network
    known: Interval
    unstable: Mapping[str, Tensor]
    deadline: float
    settings: SearchSettings

    @cached_property
    def _layers(self) -> Mapping[str, Preactivation]:
        return {layer.value: layer for layer in Preactivations.of(self.network).each}

    def __call__(self, backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
        before = _part(self.known, self._layers[name]).arranged(lambda end: end.gather(1, index))
        unstable = self.unstable.get(name)
        if unstable is None or not len(place := unstable[index[0]].nonzero().squeeze(1)):
            return before
        found = self._bound_entries(backward, name, index[:, place], options)
        lower, upper = before.lower.clone(), before.upper.clone()
        lower[:, place], upper[:, place] = found.lower, found.upper
        return before.meet(Interval(lower, upper))

    def _bound_entries(self, backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
        """Bound entries ``(1, n)`` by plain rows, and optimise those that these leave unstable, while there is time."""
        plan, started = self.settings.time, time.monotonic()
        plain = one_pass(backward, name, index, options)
        place = self._left_unstable(name, index, plain).nonzero().squeeze(1)  # the device answers when it is done
        now = time.monotonic()
        until = plan.layer_deadline(now, self.deadline, *self._work_from(name))
        seconds = plan.passes_per_iteration * (now - started) * len(place) / index.shape[1]
        if not len(place) or now + self.settings.activations.intermediate.fewest_iterations * seconds > until:
            return plain
        options = replace(options, ascent=replace(options.ascent, deadline=until))
        found = plain.map(Tensor.clone)
        best = both_optimised(backward, name, index[:, place], options)
        found.lower[:, place], found.upper[:, place] = best.lower, best.upper
        return plain.meet(found)

    def _left_unstable(self, name: str, index: Tensor, plain: Interval) -> Tensor:
        """Return which of the entries ``(n,)`` are unstable within their ``plain`` bounds."""
        layer = self._layers[name]
        place, within = layer.offset + index, self.known.map(Tensor.clone)
        within.lower.scatter_(1, place, plain.lower)
        within.upper.scatter_(1, place, plain.upper)
        return unstable_entries(self.network, self.known.meet(within), layer)[index[0]]

    def _work_from(self, name: str) -> tuple[float, float]:
        """Return the work of a layer, and that of it and all after it: rows, and the values that they pass."""
        values, work = 0, dict[str, float]()
        for node in self.network.graph.nodes:
            values += node.size
            if node.name in self.unstable:
                work[node.name] = values * float(self.unstable[node.name].sum())
        names = list(work)
        return work[name], sum(work[each] for each in names[names.index(name) :])


STAGE = "the bounds of the whole box"


@dataclass(frozen=True, eq=False)
class RootBounds:
    """The whole box: bounds ``(1, entries)`` of all preactivations, and margins ``(disjuncts, rows)`` of the rows.

    ``is_hurried`` says that time did not suffice for optimised ones.
    """

    box: Interval
    bounds: Interval
    specification_rows: DisjunctRows
    margins: Tensor
    analysis: Analysis
    is_hurried: bool


@torch.no_grad()
def bound_root(
    model: ModelUnderVerification, specification: Specification, method: Method, deadline: float
) -> RootBounds:
    """Bound the whole box by CROWN, and by an optimising method if it may help and there is time; an engine that
    refines optimises later.
    """
    engine, box = model.engine, model.together(STAGE, lambda: specification.box(model.dtype))
    started = time.monotonic()
    first = CROWN if method.intermediate is IntermediateBounds.OPTIMISED else method
    best = method if method.optimises or method.intermediate is IntermediateBounds.INTERVALS else ALPHA_CROWN

    def analyse(method: Method, options: BoundOptions = model.options) -> tuple[Analysis, DisjunctRows, Tensor]:
        analysis = engine.analyse(method, box, options)
        return analysis, *_bound_specification(model, specification, analysis)

    analysis, specification_rows, margins = model.together(STAGE, lambda: analyse(first))
    crown_seconds = time.monotonic() - started
    late = model.engine.late(model.settings.time.last_start_of_optimised_root(deadline, crown_seconds))
    enough = late or engine.refines or bool((margins.amax(dim=1) > 0).all())
    is_hurried = best != first and not bool((margins.amax(dim=1) > 0).all())
    if best != first and not model.search_group.anywhere(enough, model.device):
        until = model.settings.time.optimising_deadline(time.monotonic(), deadline, deadline)
        options = model.options.until(until) if model.is_alone else model.options
        with suppress(MemoryShortageError, OutOfTimeError):  # the bounds so far stay
            analysis, specification_rows, margins = model.together(STAGE, lambda: analyse(best, options))
            is_hurried = False
    # Domains that ranks exchange have parameters for the entries that are open here, so these must be equal on all
    # ranks.
    search_group = RankGroup(model.search_group.axis)
    bounds = Preactivations.of(engine.network).bounds(analysis.inputs)
    return RootBounds(
        engine.entering(analysis, box),
        Interval(search_group.agree(bounds.lower), search_group.agree(bounds.upper)),
        specification_rows,
        margins,
        analysis,
        is_hurried,
    )


def _bound_specification(
    model: ModelUnderVerification, specification: Specification, analysis: Analysis
) -> tuple[DisjunctRows, Tensor]:
    """Return the rows by disjunct, and the margins that the root's bounds prove of each."""
    network, dtype = model.network, model.dtype
    rows = specification.rows.to(dtype)
    # One pass for both ends: the most of a row is less the least of its negation.
    below = model.engine.lower_bounds(analysis, torch.cat([rows, -rows]))
    least, most = below[: len(rows)], -below[len(rows) :]
    inputs, offsets = specification.of_inputs(dtype), specification.offsets(least, most)
    if isinstance(inputs, Interval):
        offsets = specification.offsets(least + inputs.lower, most + inputs.upper) - inputs.lower
    place = torch.stack(
        [(specification.disjunct[:index] == own).sum() for index, own in enumerate(specification.disjunct)]
    )
    shape = specification.disjunct_count, int(place.max()) + 1
    used = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    used[specification.disjunct, place] = True
    specification_rows = DisjunctRows(
        network.graph.output.name, rows.new_zeros(*shape, rows.shape[1]), rows.new_zeros(shape), used
    )
    (
        specification_rows.rows[specification.disjunct, place],
        specification_rows.offsets[specification.disjunct, place],
    ) = rows, offsets
    margins = rows.new_full(shape, -torch.inf)
    margins[specification.disjunct, place] = least - offsets
    return specification_rows, margins.nan_to_num(nan=-torch.inf)
