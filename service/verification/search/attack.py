"""Projected gradient descent from random starts (Madry et al., 2018), one disjunct per start."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.verification.search.goal import Goal
from service.verification.search.subject import Subject, worst_first

RESTARTS, STEPS = 64, 40


def attack(subject: Subject, goal: Goal, seed: int = 0) -> tuple[float, ...] | None:
    """A counterexample in the goal's box that convinced, or none."""
    box = goal.box(subject.dtype)
    generator = torch.Generator().manual_seed(seed)
    count = max(RESTARTS, 2 * goal.disjuncts)
    weights = torch.rand(count, box.lower.shape[1], generator=generator, dtype=subject.dtype).to(subject.device)
    weights[0] = 0.5
    x = box.lower + weights * box.width
    aim = torch.arange(count, device=subject.device) % goal.disjuncts
    for step in range(STEPS):
        values, gradient = descent(subject, goal, x, aim)
        if bool((values <= 0).any()) and (found := subject.convinced(goal, x[worst_first(values, 8)])):
            return found
        size = 0.25 * (1 - step / STEPS) + 0.005
        x = inside(x - gradient.sign() * size * box.width, box)
    values, _ = descent(subject, goal, x, aim)
    return subject.convinced(goal, x[worst_first(values, 8)])


def descent(subject: Subject, goal: Goal, x: Tensor, aim: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How far each input is from violating the disjunct it aims at, or its nearest one; and the gradient."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        each = goal.per_disjunct(goal.excess(subject.module(x)))
        values = each.amin(dim=1) if aim is None else each.gather(1, aim[:, None]).squeeze(1)
        (gradient,) = torch.autograd.grad(values.sum(), x)
    return values.detach(), gradient


def inside(x: Tensor, box: Interval) -> Tensor:
    return torch.minimum(torch.maximum(x, box.lower), box.upper)
