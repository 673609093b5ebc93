"""Attacks functions that jump, such as floors, signs and comparisons: gradients say nothing about a step.

:func:`attack_at_steps` descends as if steps were ramps, to the steps, however far away. The remaining counterexamples
are narrow: inputs between two steps, or beyond one only at a corner. :class:`StepSides` tries corners, inputs where the
value that decides a step is least or greatest, and both sides of steps: between two inputs on different sides of one,
halving finds two neighbours among the numbers of the model's own type.

It runs in float64, whose rounding is finer than the distance of such neighbours, on a rank that has the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.verification.bab.attack import attack, gradient_batch_size
from service.verification.bab.model import ModelUnderVerification, RampedGraph, gradient_at
from service.verification.bab.specification import Counterexample, Specification


def attack_at_steps(
    model: ModelUnderVerification,
    specification: Specification,
    deadline: float = inf,
    seed: int = 0,
    restarts: int | None = None,
) -> Counterexample | None:
    """Return a confirmed counterexample of a model that jumps, or none until ``deadline`` (``time.monotonic``).

    ``restarts`` as in :func:`~service.verification.bab.attack.attack`. A model without steps has none.
    """
    if (graph := model.ramped) is None:
        return None
    ramped = replace(model, module=graph, dtype=torch.float64)
    found = attack(ramped, specification, deadline, seed, restarts)
    return found or StepSides(model, specification, graph, seed).of_all(deadline)


def step_sides(model: ModelUnderVerification, specification: Specification) -> StepSides | None:
    """Return the search for counterexamples at a model's steps, if it has any."""
    graph = model.ramped
    return None if graph is None else StepSides(model, specification, graph, 0)


@dataclass(eq=False)
class StepSides:
    """Tries both sides of a model's steps, corners, and extremes of the values that decide steps."""

    model: ModelUnderVerification
    specification: Specification
    graph: RampedGraph
    seed: int

    def __post_init__(self) -> None:
        self.settings, self.own = self.model.settings.steps, _own_type(self.model)
        self.box = self.specification.box(torch.float64)
        self.batch_size = gradient_batch_size(replace(self.model, dtype=torch.float64))
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def _most(self) -> int:
        """Return how many inputs all of the network's values are held of."""
        return self.settings.values // self.model.engine.entries

    def of_all(self, deadline: float) -> Counterexample | None:
        """Try the whole box: between points of every kind, and then between points that were found at steps."""
        count = max(2, min(self.settings.points, self._most))
        x = torch.cat([self._uniform(count), self._corners(count), self._extremes(count)])
        for _ in range(self.settings.rounds):
            if (counterexample := self._confirm_counterexample(x)) is not None:
                return counterexample
            if self.model.engine.late(deadline):
                return None
            chosen = x[self._order(len(x))[: 2 * count]]
            x = self._at_steps(chosen, chosen[self._order(len(chosen))])
            if not len(x):
                return None
        return self._confirm_counterexample(x)

    def of_boxes(self, boxes: Interval) -> Counterexample | None:
        """Try two opposite corners of each of some boxes ``(n, features)``, and the steps between them."""
        chosen = self._order(len(boxes.lower))[: max(1, min(self.settings.boxes, self._most))]
        lower, upper = boxes.lower[chosen].double(), boxes.upper[chosen].double()
        is_upper = self._random(lower.shape) < 0.5
        first, second = torch.where(is_upper, upper, lower), torch.where(is_upper, lower, upper)
        first, second = self._numbers(first), self._numbers(second)
        return self._confirm_counterexample(torch.cat([first, second, self._at_steps(first, second)]))

    def _random(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.model.device)

    def _order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator).to(self.model.device)

    def _numbers(self, x: Tensor) -> Tensor:
        """Return the inputs of the set that are numbers of the model's own type, near ``x`` ``(n, features)``."""
        first, last = self.specification.first, self.specification.last
        least, most = first.to(self.own), last.to(self.own)
        # An end that is rounded to a shorter type may be outside of the box; the next number inwards is not.
        least = torch.where(least.double() < first, torch.nextafter(least, least + inf), least)
        most = torch.where(most.double() > last, torch.nextafter(most, most - inf), most)
        rounded = x.to(self.own)
        within = torch.where(least <= most, torch.minimum(torch.maximum(rounded, least), most), rounded)
        return self.specification.nearest(within.double())

    def _uniform(self, count: int) -> Tensor:
        shares = self._random((count, self.box.lower.shape[1]))
        return self._numbers(self.box.lower + shares * self.box.width)

    def _corners(self, count: int) -> Tensor:
        """Return all corners if at most ``count`` are different, else some."""
        features = self.box.lower.shape[1]
        varying = (self.box.width[0] > 0).nonzero().flatten()
        if 2 ** len(varying) <= count:
            # The bits of a corner's number say at which inputs it has the upper end.
            number = torch.arange(2 ** len(varying), device=varying.device)
            is_upper = torch.zeros(len(number), features, dtype=torch.bool, device=varying.device)
            is_upper[:, varying] = (number[:, None] >> torch.arange(len(varying), device=varying.device)) % 2 > 0
        else:
            is_upper = self._random((count, features)) < 0.5
        return self._numbers(torch.where(is_upper, self.box.upper, self.box.lower))

    def _extremes(self, count: int) -> Tensor:
        """Return inputs where one of the values that decide steps is nearly minimal or maximal."""
        x = self._uniform(count)
        entries = self.graph.sides(x[:1]).shape[1]
        # Each value is taken twice in a row: once to be made large, and once small.
        entry = self._order(entries).repeat_interleave(2).repeat(-(-count // (2 * entries)))[:count]
        sign = 1 - 2 * (torch.arange(count, device=entry.device) % 2)

        def gradient(part: slice) -> Tensor:
            with torch.enable_grad():
                inputs = x[part].detach().requires_grad_()
                value = self.graph.deciding(inputs).gather(1, entry[part, None])[:, 0]
                return gradient_at(inputs, (sign[part] * value).sum()).nan_to_num(nan=0.0)

        for step in range(self.settings.climbs):
            gradients = torch.cat(self.model.in_parts(len(x), self.batch_size, gradient))
            x = self.box.descended(x, -gradients, 2.0**-step)
        return self._numbers(x)

    @torch.no_grad()
    def _sides(self, x: Tensor) -> Tensor:
        return torch.cat(self.model.in_parts(len(x), self.batch_size, lambda part: self.graph.sides(x[part])))

    def _at_steps(self, first: Tensor, second: Tensor) -> Tensor:
        """Return inputs on both sides of a step between each two of ``(n, features)`` that are not on the same sides of
        all steps: the nearest two, and some that are a little farther apart.
        """
        here, there = self._sides(first), self._sides(second)
        apart = (here != there) & ~(here.isnan() & there.isnan())
        among = apart.any(dim=1)
        first, second, here, apart = first[among], second[among], here[among], apart[among]
        if not len(first):
            return first
        # Of several steps between two inputs one is taken at random: which of them leads anywhere is unknown.
        entry = (self._random(apart.shape) * apart).argmax(dim=1, keepdim=True)
        side, away = here.gather(1, entry), second - first
        for halving in range(self.settings.halvings + torch.finfo(self.own).bits):
            # Halves of the distance come near a step soon; only halves of the numbers in between end at two neighbours.
            middle = first / 2 + second / 2 if halving < self.settings.halvings else self._between(first, second)
            middle = self._numbers(middle)
            is_same = self._sides(middle).gather(1, entry) == side
            first, second = torch.where(is_same, middle, first), torch.where(is_same, second, middle)
        moved = [self._numbers(first - share * away) for share in self.settings.apart]
        moved += [self._numbers(second + share * away) for share in self.settings.apart]
        return torch.cat([*moved, first, second])

    def _between(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the inputs that have as many numbers of the model's own type on either side, up to one: beside 0, or
        beside a small number, halves of a distance would be many.
        """
        low, high = (_rank(each.to(self.own)) for each in (first, second))
        # The mean of two whole numbers, rounded down: their sum may be beyond the largest one.
        return _of_rank((low >> 1) + (high >> 1) + (low & high & 1), self.own).double()

    @torch.no_grad()
    def _confirm_counterexample(self, x: Tensor) -> Counterexample | None:
        """Return the first of the inputs that the model confirms. Of those that are equally far beyond the thresholds
        the earlier ones come first.
        """
        specification = self.specification
        parts = self.model.in_parts(
            len(x), self.batch_size, lambda part: specification.excess(self.graph(x[part]), x[part])
        )
        distances = specification.distance_to_nearest(torch.cat(parts).nan_to_num(nan=inf))
        self.model.visited.add(specification, x, distances)
        beyond = (distances <= 0).nonzero().flatten()
        # Of many inputs at one step all have the same distance, and `topk` would leave their order to the device.
        order = distances[beyond].sort(stable=True).indices[: self.settings.candidates]
        return self.model.first_confirmed(specification, x[beyond[order]]) if len(order) else None


_WHOLE = {torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def _rank(x: Tensor) -> Tensor:
    """Return the place of each number among all of its type, from 0, which is that of 0."""
    size = x.abs().view(_WHOLE[x.dtype]).to(torch.int64)
    return torch.where(x < 0, -size, size)


def _of_rank(rank: Tensor, dtype: torch.dtype) -> Tensor:
    size = rank.abs().to(_WHOLE[dtype]).view(dtype)
    return torch.where(rank < 0, -size, size)


def _own_type(model: ModelUnderVerification) -> torch.dtype:
    """Return the type of the numbers that the model takes."""
    if model.runtime is None:
        return model.dtype
    return torch.from_numpy(np.empty(0, model.runtime.dtype)).dtype
