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
from service.verification.search.goal import Goal
from service.verification.search.subject import Subject, worst_first

RESTARTS, STEPS, DIVERSIFYING = 64, 60, 5
SAMPLES, AT_ONCE = 4096, 4096
EFFORT = 2**25
"""Entries of all of the network's values that sampling and one round's descent may take."""
TRIED, FEW_STEPS = 32, 4
"""Starts and steps of an attack on boxes."""
MOST_PARTS = 64
"""In which samples go through the network: fewer are drawn where memory makes parts small."""
COPIES, COPIES_OF_INPUT = 3, 16
"""Of all values of the network and of its input, that a gradient and an optimiser hold for each start."""
CONVINCING = 8
"""Candidates that are looked at in float64 at a time."""
Counterexample = tuple[float, ...]


def attack(
    subject: Subject, goal: Goal, deadline: float = inf, seed: int = 0, restarts: int = RESTARTS
) -> Counterexample | None:
    """A counterexample in the goal's box that convinced, or none until ``deadline`` (``time.monotonic``).

    Raises as :func:`inputs_at_once` does.
    """
    samples = max(restarts, min(SAMPLES, EFFORT // subject.entries))
    made = _Attack(subject, goal, deadline, seed, max(restarts, 2 * goal.disjuncts))
    return halving(samples, made.everywhere, subject.device, alone=subject.is_alone)


def attack_nearby(subject: Subject, goal: Goal, samples: int, seed: int, deadline: float) -> Counterexample | None:
    """The same by short steps from the best of very many random inputs: counterexamples may be rare."""
    made = _Attack(subject, goal, deadline, seed, 4 * max(RESTARTS, goal.disjuncts))
    return halving(samples, made.nearby, subject.device, alone=subject.is_alone)


def inputs_at_once(subject: Subject) -> int:
    """Inputs whose gradients are found together; all ranks that have the model call it.

    Raises :class:`~service.bounds.memory.MemoryShortageError` where there is no memory for one.
    """
    floats = COPIES * subject.entries + COPIES_OF_INPUT * subject.network.graph.input.size
    each = floats * torch.finfo(subject.dtype).bits // 8
    return subject.memory.plan(subject.device, each, AT_ONCE, share=2, least=subject.least)


class _Attack:
    """Everything random comes from one generator on the host, so that ranks and devices do the same."""

    def __init__(self, subject: Subject, goal: Goal, deadline: float, seed: int, restarts: int) -> None:
        self.subject, self.goal, self.box = subject, goal, goal.box(subject.dtype)
        self.deadline = deadline
        self.at_once = inputs_at_once(subject)
        self.generator = torch.Generator().manual_seed(seed)
        self.aim = torch.arange(restarts, device=subject.device) % goal.disjuncts

    def everywhere(self, samples: int) -> Counterexample | None:
        x, excess = self._sampled(samples)
        if found := self._convinced(x, self.goal.per_disjunct(excess).amin(dim=1)):
            return found
        scale, sizes = _spread(excess), self._sizes(0.02, 0.2)
        if found := self._descend(self._best(x, excess / scale), scale, sizes):
            return found
        starts = self._inside(self._random(len(self.aim), x.shape[1]))
        return self._descend(self._diversified(starts), scale, sizes)

    def nearby(self, samples: int) -> Counterexample | None:
        x, excess = self._sampled(samples)
        if found := self._convinced(x, self.goal.per_disjunct(excess).amin(dim=1)):
            return found
        return self._descend(self._best(x, excess), torch.ones_like(excess[0]), self._sizes(0.001, 0.05))

    def _sampled(self, count: int) -> tuple[Tensor, Tensor]:
        """Random inputs and the box's centre, with their excess."""
        count = min(count, max(len(self.aim), MOST_PARTS * self.at_once))
        x = self._inside(self._random(count, self.box.lower.shape[1]))
        x[0] = self.box.centre[0]
        return x, excess_of(self.subject, self.goal, x, self.at_once)

    def _sizes(self, least: float, most: float) -> Tensor:
        """First steps, as shares of the width: eight sizes for each disjunct's starts."""
        turn = torch.arange(len(self.aim), device=self.aim.device) // self.goal.disjuncts
        return (least * (most / least) ** ((turn % 8) / 7)).unsqueeze(1).to(self.subject.dtype)

    def _random(self, *shape: int) -> Tensor:
        random = torch.rand(*shape, generator=self.generator, dtype=self.subject.dtype)
        return random.to(self.subject.device)

    def _inside(self, shares: Tensor) -> Tensor:
        return inside(self.box.lower + shares * self.box.width, self.box)

    def _convinced(self, x: Tensor, values: Tensor) -> Counterexample | None:
        if not bool((values <= 0).any()):
            return None
        return self.subject.convinced(self.goal, x[worst_first(values, CONVINCING)])

    def _best(self, samples: Tensor, excess: Tensor) -> Tensor:
        """For every start the next best sample of the disjunct that it aims at."""
        each, turns = self.goal.per_disjunct(excess), -(-len(self.aim) // self.goal.disjuncts)
        order = each.topk(min(turns, len(each)), dim=0, largest=False).indices
        turn = torch.arange(len(self.aim), device=self.aim.device) // self.goal.disjuncts
        return samples[order[turn.clamp(max=len(order) - 1), self.aim]]

    def _diversified(self, x: Tensor) -> Tensor:
        towards = 2 * self._random(len(x), self.goal.rows.shape[1]) - 1
        for _ in range(DIVERSIFYING):
            signs = self.subject.in_parts(len(x), self.at_once, partial(self._rising, x, towards))
            x = inside(x + 0.25 * torch.cat(signs) * self.box.width, self.box)
        return x

    def _rising(self, x: Tensor, towards: Tensor, part: slice) -> Tensor:
        """The signs of the gradients of ``towards · outputs`` at a part of the inputs."""
        with torch.enable_grad():
            own = x[part].detach().requires_grad_()
            (gradient,) = torch.autograd.grad((towards[part] * self.subject.outputs(own)).sum(), own)
        return gradient.sign()

    def _descend(self, x: Tensor, scale: Tensor, sizes: Tensor) -> Counterexample | None:
        """On the rows of the aim that are still positive."""
        ahead = _Straight(self.box) if isinstance(self.box, Ball) else _Adam(self.box)
        for step in range(STEPS):
            values, gradient = descent(self.subject, self.goal, x, self.at_once, aim=self.aim, scale=scale)
            if found := self._convinced(x, values):
                return found
            if self.subject.late(self.deadline):
                return None
            size = sizes * ((1 - step / STEPS) ** 2 + 0.002)
            x = inside(x - size * ahead(gradient), self.box)
        return self._convinced(x, descent(self.subject, self.goal, x, self.at_once, aim=self.aim)[0])


class _Adam:
    """Ways as long as a box is wide, from all gradients so far (Kingma and Ba, 2015), in units of its width."""

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


class _Straight:
    """Ways as long as a ball is wide, along the gradients: its inputs are not bounded one by one."""

    def __init__(self, ball: Ball) -> None:
        self.ball = ball
        self.mean = torch.zeros_like(ball.lower)

    def __call__(self, gradient: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * _unit(gradient)
        return across(self.ball, self.mean)


def across(box: Interval, gradient: Tensor) -> Tensor:
    """The way through the set, at its widest, along which a linear function of this gradient grows most."""
    return 2 * box.distance * _unit(gradient) if isinstance(box, Ball) else gradient.sign() * box.width


def _unit(vectors: Tensor) -> Tensor:
    lengths: Tensor = vectors.norm(dim=1, keepdim=True)
    return vectors / lengths.clamp(min=1e-30)


def _spread(excess: Tensor) -> Tensor:
    """A unit for each row."""
    least = 1e-6 * excess.abs().amax().nan_to_num() + 1e-30
    return excess.std(dim=0).nan_to_num(nan=0.0).clamp(min=least)


@torch.no_grad()
def attack_boxes(subject: Subject, goal: Goal, box: Interval, shares: Tensor, at_once: int) -> Counterexample | None:
    """From the best of some points of each of the boxes ``(n, features)``, a few long steps to the nearest disjunct.

    ``shares`` ``(points, features)`` are places in a box, from 0 to 1.
    """
    points = (box.lower + shares[:, None] * box.width).flatten(0, 1)
    excess = excess_of(subject, goal, points, at_once)
    best = torch.tensor(worst_first(goal.per_disjunct(excess).amin(dim=1), TRIED), device=points.device)
    home = box.map(lambda end: end[best % len(end)])
    return descend(subject, goal, home, inside(points[best], home), at_once)


@torch.no_grad()
def excess_of(subject: Subject, goal: Goal, x: Tensor, at_once: int) -> Tensor:
    """The :meth:`Goal.excess` at inputs ``(n, features)``, +inf where the outputs are no numbers."""
    found = subject.in_parts(len(x), at_once, lambda part: goal.excess(subject.outputs(x[part])))
    return torch.cat(found).nan_to_num(nan=torch.inf)


def descend(subject: Subject, goal: Goal, box: Interval, x: Tensor, at_once: int) -> Counterexample | None:
    """A few long steps from each of ``x`` ``(n, features)`` in boxes ``(n, features)``, to the nearest disjunct."""
    for step in range(FEW_STEPS):
        values, gradient = descent(subject, goal, x, at_once)
        if bool((values <= 0).any()):
            found = subject.convinced(goal, x[worst_first(values, CONVINCING)])
            if found is not None:
                return found
        x = inside(x - across(box, gradient) / 2 ** (step + 1), box)
    return None


def descent(
    subject: Subject, goal: Goal, x: Tensor, at_once: int, *, aim: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How far each input is from violating the disjunct it aims at, or its nearest one; and the way there.

    The way is the gradient of that distance; with ``scale`` ``(rows,)`` of the sum of all of the disjunct's rows
    that are positive, in these units.
    """
    found = subject.in_parts(
        len(x), at_once, lambda part: _descent(subject, goal, x[part], None if aim is None else aim[part], scale)
    )
    values, gradients = zip(*found, strict=True)
    return torch.cat(values), torch.cat(gradients)


def _descent(
    subject: Subject, goal: Goal, x: Tensor, aim: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        excess = goal.excess(subject.outputs(x))
        each = goal.per_disjunct(excess)
        nearest = each.argmin(dim=1) if aim is None else aim
        values = each.gather(1, nearest[:, None]).squeeze(1)
        slope = values
        if scale is not None:
            rows = goal.disjunct == nearest[:, None]
            slope = ((excess.clamp(min=0) / scale) * rows).sum(dim=1)
        (gradient,) = torch.autograd.grad(slope.sum(), x)
    return values.detach(), gradient.nan_to_num(nan=0.0)


def inside(x: Tensor, box: Interval) -> Tensor:
    return box.nearest(x)
