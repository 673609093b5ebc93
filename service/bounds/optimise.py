"""Bounds with the best relaxations that a few steps of gradient ascent find (α-CROWN, Xu et al., 2021).

Every row has relaxations of its own. Bounds on the operators' inputs are fixed, so no row depends on another:
rows go in parts of any size, and the memory is that of one part. Any parameter between 0 and 1 is sound, so
each row's bound is the largest one found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from service.bounds.buffers import overwrite, own_copy
from service.bounds.fused import Adam
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import InitialRows, Propagated, backward_rule
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.patches import Patches
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.near import NearLayers
from service.bounds.network import Network, OptimisedBefore
from service.bounds.relaxation import Family, PatchFamily, Relaxed, Single
from service.bounds.replay import Plain, Recorded


@dataclass(frozen=True)
class Ascent:
    """Adam's step, in units of the parameters' range, and the share of it that remains after all iterations.

    Bounds are settled once :data:`STRIDE` iterations gained no more than ``least_share`` of the total gain, or the
    total gain is no more than ``least_gain`` of the width, counted from both sides for an entry; a part ends when all
    its rows are settled. After ``deadline`` (``time.monotonic``) a part has one iteration, and records nothing;
    ascents that differ only in it are equal.
    """

    iterations: int = 20
    learning_rate: float = 0.5
    last_step: float = 0.12
    least_share: float = 0.03
    least_gain: float = 2e-3
    deadline: float = field(default=inf, compare=False)

    @property
    def decay(self) -> float:
        """Return the factor of the step after each iteration."""
        return float(self.last_step ** (1 / max(1, self.iterations)))


STRIDE = 3
"""The number of iterations whose gain is judged together: the first steps often overshoot."""


@dataclass(eq=False)
class Brought:
    """The gain of optimisation, in the mean over all bounds.

    ``before`` and ``after`` are sums of the finite widths; ``iterations`` and ``most`` count the iterations that were
    run and those that might have been, once for each bound.
    """

    before: float = 0.0
    after: float = 0.0
    iterations: int = 0
    most: int = 0

    def add(self, first: Tensor, best: Tensor, iterations: int, most: int) -> None:
        """Count bounds by their widths ``(batch, bounds)`` at the start and at the end."""
        finite = first.isfinite() & best.isfinite()
        self.before += float(torch.where(finite, first, 0.0).double().sum())
        self.after += float(torch.where(finite, best, 0.0).double().sum())
        self.iterations += iterations * first.shape[1]
        self.most += most * first.shape[1]

    @property
    def narrower(self) -> float:
        """Return the share of the width that is gone."""
        return 1 - self.after / self.before if self.before > 0 else 0.0


@dataclass(eq=False)
class Gains:
    """How much optimisation has tightened intermediate bounds, and those of the requested rows."""

    intermediate: Brought = field(default_factory=Brought)
    asked: Brought = field(default_factory=Brought)

    def __bool__(self) -> bool:
        return bool(self.intermediate.most or self.asked.most)

    def __str__(self) -> str:
        both = self.intermediate, self.asked
        share = sum(each.iterations for each in both) / max(1, sum(each.most for each in both))
        kinds = [("intermediate bounds", self.intermediate), ("bounds asked for", self.asked)]
        said = [f"{name} {each.narrower:.2%} narrower" for name, each in kinds if each.most]
        return ", ".join([*said, f"by {share:.0%} of iterations"])


@dataclass(eq=False)
class Families:
    """The families of a pass's non-linear nodes, each made when first needed."""

    backward: Pass
    _made: dict[str, Family] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Family:
        if name not in self._made:
            network, intervals = self.backward.network, self.backward.intervals
            node = network.nodes[name]
            bounds = [intervals[each].map(Tensor.detach) for each in node.inputs]
            self._made[name] = self._near.family(node, bounds, network.operator_of(node).family(node, bounds))
        return self._made[name]

    @cached_property
    def _near(self) -> NearLayers:
        network = self.backward.network
        return NearLayers.of(network, self.backward.intervals[network.graph.input.name])


@dataclass(eq=False)
class _ChosenRelaxation(Relaxed):
    """The member of a family for each row; its parameters exist from the first step, which tells how many rows.

    ``anchor`` is a one that takes a gradient if there are no parameters, so that the gradient passes here on every
    rank.
    """

    family: Family
    anchor: Tensor | None = None
    parameters: tuple[Tensor, ...] | None = None
    is_shown: bool = False
    starts_anew: bool = False

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        self._begin(coefficients.shape[1])
        if not self.parameters and self.anchor is not None:
            coefficients = coefficients * self.anchor
        return self.family.member(self.parameters or ()).backward(coefficients)

    @backward_rule(GatheredRows)
    def backward_gathered(self, rows: GatheredRows) -> Propagated | None:
        # The anchor gets its gradient from dense coefficients; gathered rows have none of their own.
        if self.anchor is not None:
            return None
        self._begin(rows.count)
        return self.family.member(self.parameters or ()).propagate_backward(rows)

    def _begin(self, rows: int) -> None:
        if self.parameters is None:
            starts = (each.unsqueeze(1).repeat(1, rows, *(1 for _ in each.shape[1:])) for each in self.family.start)
            self.parameters = tuple(start.requires_grad_() for start in starts)

    @backward_rule(Patches)
    def backward_patches(self, patches: Patches) -> Propagated | None:
        if isinstance(self.family, Single):
            return self.family.relaxed.propagate_backward(patches)
        if not isinstance(self.family, PatchFamily):
            return None
        shown = self.family.shown(patches)
        if self.parameters is None:
            self.parameters = tuple(each.clone().requires_grad_() for each in shown.start)
            self.is_shown = True
        # Only now is it known which places these rows show, and so where their parameters begin.
        elif self.starts_anew:
            self._set(shown.start)
        (values,), bias = shown.member(self.parameters).backward(patches.values)
        return Propagated((replace(patches, values=values, inside=True),), bias)

    def reset(self) -> None:
        """Reset to the start. Patches are reset at their next pass, since other rows show other places."""
        self.starts_anew = self.is_shown
        if not self.is_shown:
            self._set(tuple(each.unsqueeze(1) for each in self.family.start))

    def _set(self, start: tuple[Tensor, ...]) -> None:
        for parameter, value in zip(self.parameters or (), start, strict=True):
            parameter.data.copy_(value)
        self.starts_anew = False


class SlopeOptimiser:
    """A pass back from ``start`` through relaxations whose parameters take a step after each gradient.

    If previous stages have parameters, these take the same step.
    """

    def __init__(self, families: Families, start: str, ascent: Ascent) -> None:
        network = families.backward.network
        self.start, self.ascent, self.network = start, ascent, network
        # The open entries differ by rank, but the ranks' work for each other's gradients must run on all of them.
        some = families.backward.intervals[network.graph.input.name].lower
        together = network.tp_group.axis.size > 1 or network.before is not None
        self.anchor = some.new_ones(()).requires_grad_() if together else None
        self.chosen = {name: _ChosenRelaxation(families[name], self.anchor) for name in _before(network, start)}
        self.before: OptimisedBefore | None = None
        if network.before is not None and self.anchor is not None:
            self.before = network.before.optimised(self.anchor)
        self.backward = replace(families.backward, relaxations=self.chosen, before=self.before, ascends=True)
        self.optimizer: Adam | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for chosen in self.chosen.values() for parameter in chosen.parameters or ()]

    def step(self, bounds: Tensor, gradient: Tensor, beside: Sequence[Tensor] = ()) -> None:
        """Step against ``gradient``, that of the last pass's ``bounds``; tensors ``beside`` only get gradients."""
        anchors = [] if self.anchor is None else [self.anchor]
        for each in (sought := [*(moving := self.parameters), *anchors, *beside]):
            each.grad = None
        torch.autograd.backward(bounds, gradient, inputs=sought)
        if moving:
            self.optimizer = self.optimizer or Adam(moving, self.ascent.learning_rate, self.ascent.decay)
            self._move(self.optimizer)

    @torch.no_grad()
    def restart(self) -> None:
        """Go back to the state before the first step."""
        if self.before is not None:
            self.before.restart()
        for chosen in self.chosen.values():
            if chosen.parameters is not None:
                chosen.reset()
        if self.optimizer is not None:
            self.optimizer.restart()

    @torch.no_grad()
    def _move(self, optimizer: Adam) -> None:
        optimizer.step()
        for name, chosen in self.chosen.items():
            for parameter in chosen.parameters or ():
                self._keep_equal(name, parameter)

    def _keep_equal(self, name: str, parameter: Tensor) -> None:
        """Keep replicas equal: if they drifted apart, every rank would have a summand of another sum, and their
        sum would be no bound at all.
        """
        if self._is_replicated(name):
            parameter.copy_(self.network.tp_group.agree(parameter))

    def _is_replicated(self, name: str) -> bool:
        """Return whether each of several ranks has the same entries of this node."""
        divided = self.backward.divided or self.network.is_own(name)
        return self.network.tp_group.axis.size > 1 and not divided


class RowOptimiser(SlopeOptimiser):
    """Bounds parts of ``start``'s rows, all of the shape of ``rows``, one after the other.

    ``rows`` are as for :meth:`Pass.lower_bounds`. If the width of a row's bounds is known, from its negative
    beside it or from an upper bound, iterations end when they gain too little.
    """

    def __init__(
        self, families: Families, start: str, rows: InitialRows, ascent: Ascent, brought: Brought | None = None
    ) -> None:
        super().__init__(families, start, ascent)
        self.rows = own_copy(rows)
        self.brought = Brought() if brought is None else brought
        self.best: Tensor | None = None
        self.settled: Tensor | None = None
        self.above: Tensor | None = None
        self.has_begun = False
        device = families.backward.device
        # Ranks that communicate inside a record would have to replay it in step, so they record nothing.
        alone = device.type == "cuda" and self.anchor is None
        self.repeat = Recorded(device) if alone else Plain()

    def best_bounds(self, rows: InitialRows, above: Tensor | None = None) -> Tensor:
        """Return the largest lower bounds ``(batch, rows)`` found; ``above`` are upper bounds of the rows."""
        overwrite(rows, self.rows)
        self.above = above
        self.has_begun = False
        if self.best is not None:
            # Also if there was nothing to choose: bounds of the previous part are none of these rows.
            self.best.fill_(-torch.inf)
            if self.settled is not None:
                self.settled.fill_(value=False)
            self.restart()
        with torch.enable_grad():
            if above is not None or (isinstance(rows, IdentityRows) and rows.mirrored):
                self._ascend_while_it_pays()
            else:
                self.repeat.run(self._ascend, self.ascent.iterations)
        assert self.best is not None
        return self.best.clone()

    def _ascend_while_it_pays(self) -> None:
        """Run iterations until all rows are settled, each by itself: the other rows of a part do not change a row's
        bound.

        Tensor-parallel ranks stop together: each pass needs all of them.
        """
        most, done = self.ascent.iterations, min(1, self.ascent.iterations)
        self.repeat.run(self._ascend, done)
        # The first pass is needed whatever it gains: it makes the parameters, and tells whether there are any.
        first = before = self._widths()
        is_free = self._is_any_free()
        while done < most and is_free and not self._is_late():
            count = min(STRIDE, most - done)
            self.repeat.run(self._ascend, count)
            done, now = done + count, self._widths()
            if done < most:  # after the last iteration nothing is left to save
                self._settle(self._is_little(first, before, now))
                if self._are_all_settled():
                    break
            before = now
        self.brought.add(first, self._widths(), done, most)

    def _is_late(self) -> bool:
        """Return whether the time of a rank that computes alone is over; others may see another time."""
        return self.anchor is None and time.monotonic() > self.ascent.deadline

    def _is_little(self, first: Tensor, before: Tensor, now: Tensor) -> Tensor:
        """Return the bounds that gained too little in the last iterations, or in all of them; never those of a width
        that was infinite.
        """
        latest, total = before - now, first - now
        is_little = (latest <= self.ascent.least_share * total) | (total <= self.ascent.least_gain * first)
        return is_little & first.isfinite()

    @torch.no_grad()
    def _settle(self, found: Tensor) -> None:
        """Keep the best bounds of entries or rows ``(batch, count)`` from here on."""
        assert self.settled is not None
        # Mirrored rows are two for each entry, one for each end; with upper bounds beside them, rows are entries.
        self.settled.logical_or_(found if self.above is not None else torch.cat([found, found], dim=1))

    def _is_any_free(self) -> bool:
        """Return whether there is a parameter, on any rank or in a previous stage, which alone knows its own."""
        own = any(each.numel() for each in self.parameters)
        group = self.network.tp_group
        return self.network.before is not None or bool(group.largest(int(own), self.backward.device))

    def _are_all_settled(self) -> bool:
        assert self.settled is not None
        return bool(self.network.tp_group.least(int(self.settled.all()), self.backward.device))

    @torch.no_grad()
    def _widths(self) -> Tensor:
        """Return widths between the best bounds of mirrored rows ``(batch, entries)``, or of rows and bounds above."""
        assert self.best is not None
        if self.above is not None:
            lower, negated = self.best, -self.above
        else:
            lower, negated = self.best.chunk(2, dim=1)
        widths: Tensor = -negated - lower
        return self.network.tp_group.agree(widths) if self._is_replicated(self.start) else widths

    @torch.no_grad()
    def restart(self) -> None:
        super().restart()
        # Patches begin anew at their next pass. It is made here, since a record of iterations has no such step.
        if any(chosen.starts_anew for chosen in self.chosen.values()):
            self.backward.lower_bounds(self.start, self.rows)

    def _ascend(self) -> None:
        """Run one iteration: a pass, its gradient, a step."""
        if self.has_begun and isinstance(self.repeat, Plain) and time.monotonic() > self.ascent.deadline:
            return
        self.has_begun = True
        bounds = self.backward.lower_bounds(self.start, self.rows)
        if self.best is None:
            self.best = torch.full_like(bounds, -torch.inf, requires_grad=False)
            self.settled = torch.zeros_like(self.best, dtype=torch.bool)
        self._keep_best(bounds.detach())
        if bounds.requires_grad:
            # Without a bound there is no direction either.
            self.step(bounds, -bounds.detach().isfinite().to(bounds.dtype))

    def _keep_best(self, bounds: Tensor) -> None:
        """Take the bounds of unsettled rows: a row's bounds do not depend on how long others of its part go on."""
        assert self.best is not None
        assert self.settled is not None
        torch.maximum(self.best, bounds.masked_fill(self.settled, -torch.inf), out=self.best)


def _before(network: Network, start: str) -> list[str]:
    """Return the non-linear nodes that ``start`` is computed from, itself included."""
    needed = {start}
    for node in network.graph.nodes[network.position[start] :: -1]:
        if node.name in needed:
            needed.update(node.inputs)
    return [node.name for node in network.nonlinear if node.name in needed]
