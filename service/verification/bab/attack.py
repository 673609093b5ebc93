"""Attacks: searches for counterexamples by gradients, before a branch and bound and inside it.

:func:`attack` comes before a search: projected gradient descent (PGD, Madry et al., 2018) on the distance of an input
from one disjunct. Each disjunct has many starts: the best of many random inputs, and inputs that first moved
where a random combination of the outputs grows, so that the starts differ in their outputs (output-diversified
initialization, ODI, Tashiro et al., 2020).

Inside a search over inputs, :func:`attack_from_many_samples` attacks the whole box now and then, and
:func:`attack_boxes` the open boxes of every round; a search over activations attacks the minimisers of its bounds by
:func:`descend_to_nearest_disjunct`. How many starts and steps each of them takes is in
:class:`~service.verification.bab.settings.AttackSettings`. All confirm their candidates by
:meth:`~service.verification.bab.model.ModelUnderVerification.first_confirmed`.

The distance of an input from a disjunct is the largest of its rows' ``rows · y − thresholds``: 0 or less satisfies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from service.bounds.balls import Ball
from service.bounds.flat import by_instance
from service.bounds.interval import Interval
from service.bounds.memory import halving
from service.verification.bab.model import ModelUnderVerification, gradient_at, worst_first
from service.verification.bab.specification import Counterexample, Specification


def attack(
    model: ModelUnderVerification,
    specification: Specification,
    deadline: float = inf,
    seed: int = 0,
    restarts: int | None = None,
) -> Counterexample | None:
    """Return a confirmed counterexample in the specification's box, or none until ``deadline`` (``time.monotonic``).

    There are ``restarts`` starts, or as many as the settings say, and at least ``restarts_per_disjunct`` for each
    disjunct. Raises as :func:`gradient_batch_size` does.
    """
    settings = model.settings.attack
    restarts = settings.restarts if restarts is None else restarts
    samples = max(restarts, min(settings.samples, settings.values // model.engine.entries))
    restarts = max(restarts, settings.restarts_per_disjunct * specification.disjunct_count)
    descent = _ProjectedGradientDescent(model, specification, deadline, seed, restarts)
    return halving(samples, descent.from_samples_and_diversified_starts, model.device, alone=model.engine.is_alone)


def attack_from_many_samples(
    model: ModelUnderVerification, specification: Specification, samples: int, seed: int, deadline: float
) -> Counterexample | None:
    """Attack by short steps from the best of very many random inputs: counterexamples may be rare.

    It is part of a search over inputs, whatever the job's budget for the attack before it.
    """
    settings = model.settings.attack
    restarts = max(settings.search_restarts, settings.search_restarts_per_disjunct * specification.disjunct_count)
    descent = _ProjectedGradientDescent(model, specification, deadline, seed, restarts)
    return halving(samples, descent.from_best_samples, model.device, alone=model.engine.is_alone)


def gradient_batch_size(model: ModelUnderVerification) -> int:
    """Return the number of inputs whose gradients are computed together; all ranks that have the model call it.

    Raises :class:`~service.bounds.memory.MemoryShortageError` if there is not enough memory for one.
    """
    settings = model.settings.attack
    floats = settings.value_copies * model.engine.entries + settings.input_copies * model.network.graph.input.size
    bytes_per_input = floats * torch.finfo(model.dtype).bits // 8
    return model.memory.plan(model.device, bytes_per_input, settings.largest_batch, share=2, least=model.engine.least)


START_COPIES = 4
"""How many tensors like all starts are held at a time."""


class _ProjectedGradientDescent:
    """Descent in one specification's box from ``restarts`` starts, or as many as half of the memory holds, whose
    targets are the disjuncts in turn.

    ``targets`` ``(restarts,)`` are the disjuncts that the starts descend to. One generator on the host gives
    all random numbers, so that ranks and devices do the same.
    """

    def __init__(
        self, model: ModelUnderVerification, specification: Specification, deadline: float, seed: int, restarts: int
    ) -> None:
        self.model, self.specification, self.box = model, specification, specification.box(model.dtype)
        self.deadline, self.settings = deadline, model.settings.attack
        self.batch_size = gradient_batch_size(model)
        bytes_per_start = START_COPIES * self.box.lower.nbytes
        restarts = model.memory.plan(model.device, bytes_per_start, restarts, share=2, least=model.engine.least)
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.arange(restarts, device=model.device)
        self.targets, self.turns = order % specification.disjunct_count, order // specification.disjunct_count

    def from_samples_and_diversified_starts(self, samples: int) -> Counterexample | None:
        """Descend from the best of ``samples`` random inputs, and then from as many diversified ones."""
        x, excess = self._sample(samples)
        if (counterexample := self._confirm(x, self.specification.distance_to_nearest(excess))) is not None:
            return counterexample
        scale, first_steps = _spread(excess), self._first_steps(self.settings.first_steps)
        parts = self._parts(excess / scale)
        counterexample = self._descend_in(parts, self._best_samples(x, excess / scale), scale, first_steps)
        if counterexample is not None or self.model.engine.late(self.deadline):
            return counterexample
        starts = self._points(self._uniform(len(self.targets), x.shape[1]))
        return self._descend_in(parts, self._diversify_starts(starts), scale, first_steps)

    def from_best_samples(self, samples: int) -> Counterexample | None:
        """Descend from the best of ``samples`` random inputs by short steps."""
        x, excess = self._sample(samples)
        if (counterexample := self._confirm(x, self.specification.distance_to_nearest(excess))) is not None:
            return counterexample
        first_steps = self._first_steps(self.settings.search_first_steps)
        chosen = self._best_samples(x, excess)
        return self._descend_in(self._parts(excess), chosen, torch.ones_like(excess[0]), first_steps)

    def _parts(self, excess: Tensor) -> Sequence[Tensor]:
        """Return the starts that descend together, those whose targets the samples come nearest to first: of very many,
        some arrive before the deadline. All ranks that have the model together find the same.
        """
        starts = torch.arange(len(self.targets), device=excess.device)
        together = max(1, min(self.batch_size, self.settings.together // excess.shape[1]))
        if len(starts) <= together:
            return [starts]
        distances = self.model.network.tp_group.agree(self.specification.per_disjunct(excess).amin(dim=0))
        order = distances[self.targets].argsort(stable=True)
        return torch.split(starts[order], together)

    def _descend_in(
        self, parts: Sequence[Tensor], x: Tensor, scale: Tensor, first_steps: Tensor
    ) -> Counterexample | None:
        """Descend from some of ``x`` ``(restarts, features)`` after the others, until the deadline."""
        for part in parts:
            counterexample = self._descend(x[part], self.targets[part], scale, first_steps[part])
            if counterexample is not None or self.model.engine.late(self.deadline):
                return counterexample
        return None

    def _sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and the box's centre, ``(count, features)``, with their excess ``(count, rows)``."""
        count = min(count, max(len(self.targets), self.settings.largest_parts * self.batch_size))
        x = self._points(self._uniform(count, self.box.lower.shape[1]))
        x[0] = self.box.centre[0]
        return x, excess_at(self.model, self.specification, x, self.batch_size)

    def _first_steps(self, between: tuple[float, float]) -> Tensor:
        """Return the lengths of the first steps ``(restarts, 1)`` as shares of the box's width: eight for each target,
        in geometric order.
        """
        shortest, longest = between
        steps = shortest * (longest / shortest) ** ((self.turns % 8) / 7)
        return steps.unsqueeze(1).to(self.model.dtype)

    def _uniform(self, *shape: int) -> Tensor:
        """Return random numbers from 0 to 1, in the bounds' dtype."""
        return torch.rand(*shape, generator=self.generator, dtype=self.model.dtype).to(self.model.device)

    def _points(self, shares: Tensor) -> Tensor:
        """Return the inputs ``(n, features)`` at ``shares`` of the box's width from its lower ends."""
        return self.box.nearest(self.box.lower + shares * self.box.width)

    def _confirm(self, x: Tensor, distances: Tensor) -> Counterexample | None:
        return _confirm_nearest(self.model, self.specification, x, distances)

    def _best_samples(self, samples: Tensor, excess: Tensor) -> Tensor:
        """Return the next best sample of each start's target, ``(restarts, features)``."""
        distances = self.specification.per_disjunct(excess)
        starts_per_target = -(-len(self.targets) // self.specification.disjunct_count)
        order = distances.topk(min(starts_per_target, len(distances)), dim=0, largest=False).indices
        return samples[order[self.turns.clamp(max=len(order) - 1), self.targets]]

    def _diversify_starts(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(n, features)`` after steps along which random combinations of the outputs grow (ODI)."""
        directions = 2 * self._uniform(len(x), self.specification.rows.shape[1]) - 1
        for _ in range(self.settings.diversifying_steps):
            signs = self.model.in_parts(len(x), self.batch_size, partial(self._ascent_signs, x, directions))
            x = self.box.nearest(x + self.settings.diversifying_step * torch.cat(signs) * self.box.width)
        return x

    def _ascent_signs(self, x: Tensor, directions: Tensor, part: slice) -> Tensor:
        """Return the signs of the gradients of ``directions · outputs`` at a part of the inputs."""
        with torch.enable_grad():
            inputs = x[part].detach().requires_grad_()
            gradient = gradient_at(inputs, (directions[part] * self.model.outputs(inputs)).sum())
        return gradient.sign()

    def _descend(self, x: Tensor, targets: Tensor, scale: Tensor, first_steps: Tensor) -> Counterexample | None:
        """Take projected gradient steps from ``x`` ``(n, features)``, along all rows of each start's target ``(n,)``
        that are still positive, in units of ``scale`` ``(rows,)``.
        """
        optimiser = _MomentumOfBall(self.box) if isinstance(self.box, Ball) else _AdamOfBox(self.box)
        model, specification = self.model, self.specification
        for step in range(self.settings.steps):
            distances, gradient = distances_and_gradients(
                model, specification, x, self.batch_size, targets=targets, scale=scale
            )
            if (counterexample := self._confirm(x, distances)) is not None:
                return counterexample
            if model.engine.late(self.deadline):
                return None
            # Long steps leave the neighbourhood of a start; short ones at the end settle on the edge of its target.
            size = first_steps * ((1 - step / self.settings.steps) ** 2 + self.settings.last_step)
            x = optimiser.moved(x, gradient, size)
        # No iteration has looked at where the last step led.
        distances = specification.per_disjunct(excess_at(model, specification, x, self.batch_size))
        return self._confirm(x, distances.gather(1, targets[:, None]).squeeze(1))


class _AdamOfBox:
    """Adam (Kingma and Ba, 2015) in units of a box's width, from gradients whose largest entry is 1."""

    def __init__(self, box: Interval) -> None:
        self.box, self.width, self.count = box, box.width, 0
        self.mean, self.mean_square = torch.zeros_like(box.lower), torch.zeros_like(box.lower)

    def moved(self, x: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        """Return ``x`` ``(n, features)`` after steps of about a ``share`` of the box's width, by all gradients."""
        gradient = gradient * self.width
        # Sizes of gradients differ by orders of magnitude along a descent: the mean would be that of the largest alone.
        gradient = gradient / gradient.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        self.mean, self.mean_square = 0.7 * self.mean + 0.3 * gradient, 0.9 * self.mean_square + 0.1 * gradient**2
        self.count += 1
        deviation = (self.mean_square / (1 - 0.9**self.count)).sqrt() + 1e-8
        return self.box.nearest(x - share * self.mean / (1 - 0.7**self.count) / deviation * self.width)


class _MomentumOfBall:
    """Gradient descent with momentum for a ball, whose inputs are not bounded one by one."""

    def __init__(self, ball: Ball) -> None:
        self.ball = ball
        self.mean = torch.zeros_like(ball.lower)

    def moved(self, x: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        """Return ``x`` ``(n, features)`` after steps of a ``share`` of the ball's width, from all gradients so far."""
        self.mean = 0.5 * self.mean + 0.5 * _unit(gradient)
        return self.ball.descended(x, self.mean, share)


def _unit(vectors: Tensor) -> Tensor:
    lengths: Tensor = vectors.norm(dim=1, keepdim=True)
    return vectors / lengths.clamp(min=1e-30)


def _spread(excess: Tensor) -> Tensor:
    """Return a unit for each row ``(rows,)``: the standard deviation of its excess ``(n, rows)`` over the samples."""
    # In a unit near 0, a row that hardly changes would outweigh all others.
    least = 1e-6 * excess.abs().amax().nan_to_num() + 1e-30
    return excess.std(dim=0).nan_to_num(nan=0.0).clamp(min=least)


@torch.no_grad()
def attack_boxes(
    model: ModelUnderVerification, specification: Specification, boxes: Interval, shares: Tensor, batch_size: int
) -> Counterexample | None:
    """Attack from the best of some points of each of ``boxes`` ``(n, features)``, without leaving the point's box.

    ``shares`` ``(points, features)`` are places in a box, from 0 at its lower ends to 1.
    """
    points = (boxes.lower + shares[:, None] * boxes.width).flatten(0, 1)
    distances = specification.distance_to_nearest(excess_at(model, specification, points, batch_size))
    best = torch.tensor(worst_first(distances, model.settings.attack.box_starts), device=points.device)
    boxes_of_best = boxes.map(lambda end: end[best % len(end)])
    starts = boxes_of_best.nearest(points[best])
    return descend_to_nearest_disjunct(model, specification, boxes_of_best, starts, batch_size)


def attack_from_best(
    model: ModelUnderVerification, specification: Specification, most: int, batch_size: int, x: Tensor
) -> Counterexample | None:
    """Attack from at ``most`` so many of the inputs ``(n, *input shape)``, the best ones."""
    x = by_instance(x)
    distances = specification.distance_to_nearest(excess_at(model, specification, x, batch_size))
    starts, box = x[worst_first(distances, most)], specification.box(model.dtype)
    return descend_to_nearest_disjunct(model, specification, box, starts, batch_size)


def descend_to_nearest_disjunct(
    model: ModelUnderVerification, specification: Specification, box: Interval, x: Tensor, batch_size: int
) -> Counterexample | None:
    """Descend from each of ``x`` ``(n, features)`` in its box, of ``(n, features)`` or of one for all, to the disjunct
    that is nearest at every step.

    The first step is half as long as the box is wide, and each half as long as the one before.
    """
    for step in range(model.settings.attack.box_steps):
        distances, gradient = distances_and_gradients(model, specification, x, batch_size)
        if (counterexample := _confirm_nearest(model, specification, x, distances)) is not None:
            return counterexample
        x = box.descended(x, gradient, 0.5 ** (step + 1))
    # No iteration has looked at where the last step led.
    distances = specification.distance_to_nearest(excess_at(model, specification, x, batch_size))
    return _confirm_nearest(model, specification, x, distances)


def _confirm_nearest(
    model: ModelUnderVerification, specification: Specification, x: Tensor, distances: Tensor
) -> Counterexample | None:
    """Return the first of ``x`` ``(n, features)`` that the model confirms, if any of the ``distances`` ``(n,)``
    from a disjunct allow one. Tries at most ``candidates`` of :class:`AttackSettings`, the nearest first.
    """
    model.visited.add(specification, x, distances)
    if not bool((distances <= 0).any()):
        return None
    return model.first_confirmed(specification, x[worst_first(distances, model.settings.attack.candidates)])


@torch.no_grad()
def excess_at(model: ModelUnderVerification, specification: Specification, x: Tensor, batch_size: int) -> Tensor:
    """Return the :meth:`Specification.excess` ``(n, rows)`` at inputs ``(n, features)``, +inf if outputs are NaN."""
    parts = model.in_parts(len(x), batch_size, lambda part: specification.excess(model.outputs(x[part]), x[part]))
    return torch.cat(parts).nan_to_num(nan=torch.inf)


def distances_and_gradients(
    model: ModelUnderVerification,
    specification: Specification,
    x: Tensor,
    batch_size: int,
    *,
    targets: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the distances ``(n,)`` of inputs ``(n, features)`` from their ``targets`` ``(n,)``, or from their nearest
    disjuncts, and gradients ``(n, features)``.

    The gradients are those of the distances; with ``scale`` ``(rows,)``, of the sum of all of the disjunct's rows that
    are positive, in these units.
    """

    def of_part(part: slice) -> tuple[Tensor, Tensor]:
        chosen = None if targets is None else targets[part]
        return _distances_and_gradients(model, specification, x[part], chosen, scale)

    distances, gradients = zip(*model.in_parts(len(x), batch_size, of_part), strict=True)
    return torch.cat(distances), torch.cat(gradients)


def _distances_and_gradients(
    model: ModelUnderVerification, specification: Specification, x: Tensor, targets: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        excess = specification.excess(model.outputs(x), x)
        by_disjunct = specification.per_disjunct(excess)
        targets = by_disjunct.argmin(dim=1) if targets is None else targets
        distances = objective = by_disjunct.gather(1, targets[:, None]).squeeze(1)
        if scale is not None:
            # The distance is that of the largest row alone, whose steps would let the next ones grow by turns.
            is_targeted = specification.disjunct == targets[:, None]
            objective = ((excess.clamp(min=0) / scale) * is_targeted).sum(dim=1)
        gradient = gradient_at(x, objective.sum())
    return distances.detach(), gradient.nan_to_num(nan=0.0)
