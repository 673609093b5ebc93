"""Searching for a counterexample by gradients, before and inside a branch and bound.

Projected gradient descent (Madry et al., 2018) on how far an input is from one disjunct, with many starts for each
disjunct: the best of many random inputs, and inputs that first went where a random combination of the outputs grows,
so that the starts differ in what the network makes of them (ODI, Tashiro et al., 2020).
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from service.bounds.ball import Ball
from service.bounds.interval import Interval
from service.bounds.memory import halving
from service.verification.bab.model import ModelUnderVerification, worst_first
from service.verification.bab.specification import Specification

Counterexample = tuple[float, ...]


def attack(
    model: ModelUnderVerification,
    specification: Specification,
    deadline: float = inf,
    seed: int = 0,
    restarts: int | None = None,
) -> Counterexample | None:
    """Return a confirmed counterexample in the specification's box, or none until ``deadline`` (``time.monotonic``).

    There are ``restarts`` starts, or as many as the settings say, and at least ``restarts_per_disjunct`` for each
    disjunct. Raises as :func:`inputs_at_once` does.
    """
    settings = model.settings.attack
    restarts = settings.restarts if restarts is None else restarts
    samples = max(restarts, min(settings.samples, settings.values // model.engine.entries))
    restarts = max(restarts, settings.restarts_per_disjunct * specification.disjunct_count)
    made = _Attack(model, specification, deadline, seed, restarts)
    return halving(samples, made.everywhere, model.device, alone=model.engine.is_alone)


def attack_nearby(
    model: ModelUnderVerification, specification: Specification, samples: int, seed: int, deadline: float
) -> Counterexample | None:
    """Attack by short steps from the best of very many random inputs: counterexamples may be rare.

    It is part of a search over inputs, whatever a job says of the attack before it.
    """
    settings = model.settings.attack
    restarts = max(settings.search_restarts, settings.search_restarts_per_disjunct * specification.disjunct_count)
    made = _Attack(model, specification, deadline, seed, restarts)
    return halving(samples, made.nearby, model.device, alone=model.engine.is_alone)


def inputs_at_once(model: ModelUnderVerification) -> int:
    """Return how many inputs' gradients are found together; all ranks that have the model call it.

    Raises :class:`~service.bounds.memory.MemoryShortageError` where there is no memory for one.
    """
    settings = model.settings.attack
    floats = settings.value_copies * model.engine.entries + settings.input_copies * model.network.graph.input.size
    each = floats * torch.finfo(model.dtype).bits // 8
    return model.memory.plan(model.device, each, settings.largest_batch, share=2, least=model.engine.least)


class _Attack:
    """Everything random comes from one generator on the host, so that ranks and devices do the same."""

    def __init__(
        self, model: ModelUnderVerification, specification: Specification, deadline: float, seed: int, restarts: int
    ) -> None:
        self.model, self.specification, self.box = model, specification, specification.box(model.dtype)
        self.deadline, self.settings = deadline, model.settings.attack
        self.at_once = inputs_at_once(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.aim = torch.arange(restarts, device=model.device) % specification.disjunct_count

    def everywhere(self, samples: int) -> Counterexample | None:
        x, excess = self._sampled(samples)
        if found := self._first_confirmed(x, self.specification.per_disjunct(excess).amin(dim=1)):
            return found
        scale, sizes = _spread(excess), self._sizes(0.02, 0.2)
        if found := self._descend(self._best(x, excess / scale), scale, sizes):
            return found
        starts = self._inside(self._random(len(self.aim), x.shape[1]))
        return self._descend(self._diversified(starts), scale, sizes)

    def nearby(self, samples: int) -> Counterexample | None:
        x, excess = self._sampled(samples)
        if found := self._first_confirmed(x, self.specification.per_disjunct(excess).amin(dim=1)):
            return found
        return self._descend(self._best(x, excess), torch.ones_like(excess[0]), self._sizes(0.001, 0.05))

    def _sampled(self, count: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and the box's centre, with their excess."""
        count = min(count, max(len(self.aim), self.settings.largest_parts * self.at_once))
        x = self._inside(self._random(count, self.box.lower.shape[1]))
        x[0] = self.box.centre[0]
        return x, excess_of(self.model, self.specification, x, self.at_once)

    def _sizes(self, least: float, most: float) -> Tensor:
        """Return the first steps, as shares of the width: eight sizes for each disjunct's starts."""
        turn = torch.arange(len(self.aim), device=self.aim.device) // self.specification.disjunct_count
        return (least * (most / least) ** ((turn % 8) / 7)).unsqueeze(1).to(self.model.dtype)

    def _random(self, *shape: int) -> Tensor:
        random = torch.rand(*shape, generator=self.generator, dtype=self.model.dtype)
        return random.to(self.model.device)

    def _inside(self, shares: Tensor) -> Tensor:
        return inside(self.box.lower + shares * self.box.width, self.box)

    def _first_confirmed(self, x: Tensor, values: Tensor) -> Counterexample | None:
        if not bool((values <= 0).any()):
            return None
        return self.model.first_confirmed(self.specification, x[worst_first(values, self.settings.candidates)])

    def _best(self, samples: Tensor, excess: Tensor) -> Tensor:
        """Return for every start the next best sample of the disjunct that it aims at."""
        each, turns = self.specification.per_disjunct(excess), -(-len(self.aim) // self.specification.disjunct_count)
        order = each.topk(min(turns, len(each)), dim=0, largest=False).indices
        turn = torch.arange(len(self.aim), device=self.aim.device) // self.specification.disjunct_count
        return samples[order[turn.clamp(max=len(order) - 1), self.aim]]

    def _diversified(self, x: Tensor) -> Tensor:
        towards = 2 * self._random(len(x), self.specification.rows.shape[1]) - 1
        for _ in range(self.settings.diversifying_steps):
            signs = self.model.in_parts(len(x), self.at_once, partial(self._rising, x, towards))
            x = inside(x + 0.25 * torch.cat(signs) * self.box.width, self.box)
        return x

    def _rising(self, x: Tensor, towards: Tensor, part: slice) -> Tensor:
        """Return the signs of the gradients of ``towards · outputs`` at a part of the inputs."""
        with torch.enable_grad():
            own = x[part].detach().requires_grad_()
            (gradient,) = torch.autograd.grad((towards[part] * self.model.outputs(own)).sum(), own)
        return gradient.sign()

    def _descend(self, x: Tensor, scale: Tensor, sizes: Tensor) -> Counterexample | None:
        """Descend on the rows of the aim that are still positive."""
        ahead = _BallDirection(self.box) if isinstance(self.box, Ball) else _AdamDirection(self.box)
        for step in range(self.settings.steps):
            values, gradient = descent(self.model, self.specification, x, self.at_once, aim=self.aim, scale=scale)
            if found := self._first_confirmed(x, values):
                return found
            if self.model.engine.late(self.deadline):
                return None
            size = sizes * ((1 - step / self.settings.steps) ** 2 + 0.002)
            x = inside(x - size * ahead(gradient), self.box)
        return self._first_confirmed(x, descent(self.model, self.specification, x, self.at_once, aim=self.aim)[0])


class _AdamDirection:
    """Gives ways as long as a box is wide, from all gradients so far (Kingma and Ba, 2015), in units of its width."""

    def __init__(self, box: Interval) -> None:
        self.width, self.times = box.width, 0
        self.first, self.second = torch.zeros_like(box.lower), torch.zeros_like(box.lower)

    def __call__(self, gradient: Tensor) -> Tensor:
        gradient = gradient * self.width
        gradient = gradient / gradient.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        self.first, self.second = 0.7 * self.first + 0.3 * gradient, 0.9 * self.second + 0.1 * gradient**2
        self.times += 1
        deviation = (self.second / (1 - 0.9**self.times)).sqrt() + 1e-8
        return self.first / (1 - 0.7**self.times) / deviation * self.width


class _BallDirection:
    """Gives ways as long as a ball is wide, along the gradients: its inputs are not bounded one by one."""

    def __init__(self, ball: Ball) -> None:
        self.ball = ball
        self.mean = torch.zeros_like(ball.lower)

    def __call__(self, gradient: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * _unit(gradient)
        return across(self.ball, self.mean)


def across(box: Interval, gradient: Tensor) -> Tensor:
    """Return the way through the set, at its widest, along which a linear function of this gradient grows most."""
    return 2 * box.distance * _unit(gradient) if isinstance(box, Ball) else gradient.sign() * box.width


def _unit(vectors: Tensor) -> Tensor:
    lengths: Tensor = vectors.norm(dim=1, keepdim=True)
    return vectors / lengths.clamp(min=1e-30)


def _spread(excess: Tensor) -> Tensor:
    """Return a unit for each row."""
    least = 1e-6 * excess.abs().amax().nan_to_num() + 1e-30
    return excess.std(dim=0).nan_to_num(nan=0.0).clamp(min=least)


@torch.no_grad()
def attack_boxes(
    model: ModelUnderVerification, specification: Specification, box: Interval, shares: Tensor, at_once: int
) -> Counterexample | None:
    """Attack from the best of some points of each of the boxes ``(n, features)``, a few long steps to the nearest
    disjunct.

    ``shares`` ``(points, features)`` are places in a box, from 0 to 1.
    """
    points = (box.lower + shares[:, None] * box.width).flatten(0, 1)
    excess = excess_of(model, specification, points, at_once)
    best = torch.tensor(
        worst_first(specification.per_disjunct(excess).amin(dim=1), model.settings.attack.box_starts),
        device=points.device,
    )
    home = box.map(lambda end: end[best % len(end)])
    return descend(model, specification, home, inside(points[best], home), at_once)


@torch.no_grad()
def excess_of(model: ModelUnderVerification, specification: Specification, x: Tensor, at_once: int) -> Tensor:
    """Return the :meth:`Specification.excess` at inputs ``(n, features)``, +inf where the outputs are no numbers."""
    found = model.in_parts(len(x), at_once, lambda part: specification.excess(model.outputs(x[part])))
    return torch.cat(found).nan_to_num(nan=torch.inf)


def descend(
    model: ModelUnderVerification, specification: Specification, box: Interval, x: Tensor, at_once: int
) -> Counterexample | None:
    """Take some long steps from each of ``x`` ``(n, features)`` in boxes ``(n, features)``, to the nearest disjunct."""
    for step in range(model.settings.attack.box_steps):
        values, gradient = descent(model, specification, x, at_once)
        if bool((values <= 0).any()):
            found = model.first_confirmed(specification, x[worst_first(values, model.settings.attack.candidates)])
            if found is not None:
                return found
        x = inside(x - across(box, gradient) / 2 ** (step + 1), box)
    return None


def descent(
    model: ModelUnderVerification,
    specification: Specification,
    x: Tensor,
    at_once: int,
    *,
    aim: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how far each input is from violating the disjunct it aims at, or its nearest one; and the way there.

    The way is the gradient of that distance; with ``scale`` ``(rows,)`` of the sum of all of the disjunct's rows
    that are positive, in these units.
    """
    found = model.in_parts(
        len(x), at_once, lambda part: _descent(model, specification, x[part], None if aim is None else aim[part], scale)
    )
    values, gradients = zip(*found, strict=True)
    return torch.cat(values), torch.cat(gradients)


def _descent(
    model: ModelUnderVerification, specification: Specification, x: Tensor, aim: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        excess = specification.excess(model.outputs(x))
        each = specification.per_disjunct(excess)
        nearest = each.argmin(dim=1) if aim is None else aim
        values = each.gather(1, nearest[:, None]).squeeze(1)
        slope = values
        if scale is not None:
            rows = specification.disjunct == nearest[:, None]
            slope = ((excess.clamp(min=0) / scale) * rows).sum(dim=1)
        (gradient,) = torch.autograd.grad(slope.sum(), x)
    return values.detach(), gradient.nan_to_num(nan=0.0)


def inside(x: Tensor, box: Interval) -> Tensor:
    return box.nearest(x)
