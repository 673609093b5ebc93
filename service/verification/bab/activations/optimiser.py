"""Gradient ascent of the parameters of many domains at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from service.bounds.contents import fits, overwrite, own_copy
from service.bounds.fused import Adam
from service.bounds.methods import Effort
from service.bounds.optimise import Ascent
from service.bounds.replay import Repeat
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DomainBatch, DualObjective, DualParameters

CHECK_EVERY = 5
"""Iterations between looks at whether all domains are proved, each of which waits for the device."""


@dataclass(frozen=True)
class OptimiserSettings:
    """How an ascent goes: steps of the slopes in units of their range, of the multipliers in units of the coefficients
    that arrive, of the weights; all are multiplied by ``decay`` after each iteration. It ends early at ``deadline``
    (``time.monotonic``), but not where others take part, who may see another time.
    """

    iterations: int
    slopes: float
    multipliers: float = 0.1
    weights: float = 0.1
    decay: float = 0.97
    deadline: float = inf

    def within(self, effort: Effort, deadline: float = inf) -> OptimiserSettings:
        """Return the same course in more steps or fewer, as a method that optimises is to take more or fewer than
        usual.
        """
        usual, wanted = Ascent().iterations, effort.ascent.iterations
        iterations = -(-self.iterations * wanted // usual)
        return replace(self, iterations=iterations, decay=self.decay ** (usual / wanted), deadline=deadline)


class MultiplierAdam:
    """Adam (Kingma and Ba, 2015) for the multipliers β, each at a rate of its own.

    One that would change its sign stops at the kink. All state is in tensors that stay where they are.
    """

    def __init__(self, like: Tensor, settings: OptimiserSettings) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.count = torch.zeros(1, dtype=torch.int64, device=like.device)
        steps = torch.arange(1, settings.iterations + 1, dtype=torch.float64)
        sizes = settings.multipliers * (1 - SECOND**steps).sqrt() / (1 - FIRST**steps) * settings.decay**steps
        self.sizes = sizes.to(like)

    def restart(self) -> None:
        for each in (self.first, self.second, self.count):
            each.zero_()

    def step(self, values: Tensor, gradient: Tensor, rates: Tensor) -> None:
        self.first.lerp_(gradient, 1 - FIRST)
        self.second.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
        moved = self.first / self.second.sqrt().add_(EPSILON)
        moved.mul_(rates).mul_(self.sizes.index_select(0, self.count))
        torch.sub(values, moved, out=moved)
        values.copy_(moved.masked_fill_(values * moved < 0, 0))
        self.count += 1


FIRST, SECOND, EPSILON = 0.9, 0.999, 1e-12


class DomainOptimiser:
    """Batches of as many domains as the first, one after the other, in tensors that stay where they are.

    ``stepping`` repeats an iteration, ``looking`` the last look at where it led.
    """

    def __init__(
        self,
        objective: DualObjective,
        batch: DomainBatch,
        domains: Domains,
        settings: OptimiserSettings,
        repeats: tuple[Repeat, Repeat],
    ) -> None:
        self.objective, self.settings, self.batch = objective, settings, replace(batch, bounds={})
        self.boxes = objective.boxes(len(domains))
        self.stepping, self.looking = repeats
        self.moving = DualParameters(*(each.clone().requires_grad_() for each in DualParameters.of(domains).each))
        self.kept = DualParameters(*(each.clone() for each in DualParameters.of(domains).each))
        self.best = torch.where(batch.empty, torch.inf, domains.margin)
        self.slopes = Adam([self.moving.slopes], settings.slopes, settings.decay)
        self.beta = MultiplierAdam(domains.beta, settings)
        self.weights = Adam([self.moving.weights], settings.weights, settings.decay)

    def keep(self) -> None:
        """Copy what does not change into tensors of its own, so that :meth:`restart` may overwrite it."""
        self.batch = own_copy(self.batch)

    def takes(self, batch: DomainBatch) -> bool:
        """Return whether these domains are of the same form."""
        return fits(replace(batch, bounds={}), self.batch)

    @torch.no_grad()
    def restart(self, batch: DomainBatch, domains: Domains) -> None:
        overwrite(replace(batch, bounds={}), self.batch)
        self.best.copy_(torch.where(batch.empty, torch.inf, domains.margin))
        for new, moving, kept in zip(DualParameters.of(domains).each, self.moving.each, self.kept.each, strict=True):
            moving.copy_(new)
            kept.copy_(new)
        for each in (self.slopes, self.beta, self.weights):
            each.restart()

    @torch.no_grad()
    def run(self, domains: Domains) -> Domains:
        """Return the domains with the best margins met, never less than before, and the parameters that gave them."""
        self._optimise()
        slopes, beta, weights = (each.clone() for each in self.kept.each)
        return domains.with_(margin=self.best.clone(), slopes=slopes, beta=beta, weights=weights)

    def _optimise(self) -> None:
        for done in range(0, self.settings.iterations, CHECK_EVERY):
            self.stepping.run(self._step, min(CHECK_EVERY, self.settings.iterations - done))
            if bool((self.best > 0).all()):
                return
            if self.objective.is_alone and time.monotonic() > self.settings.deadline:
                break
        self.looking.run(self._look, 1)

    def _step(self) -> None:
        with torch.enable_grad():
            margin = self.objective.margins(self.batch, self.boxes, self.moving)
            gradients = self.objective.descent(self.batch, margin, self.moving)
        self._keep_best(margin.detach())
        _descend(self.slopes, self.moving.slopes, gradients.slopes)
        self.beta.step(self.moving.beta.detach(), gradients.beta, self.batch.scale)
        if self.objective.has_weights(self.batch):
            _descend(self.weights, self.moving.weights, gradients.weights)
            self.objective.project(self.batch, self.moving.weights.detach())

    def _look(self) -> None:
        self._keep_best(self.objective.margins(self.batch, self.boxes, self.moving))

    def _keep_best(self, margin: Tensor) -> None:
        better = margin > self.best
        torch.where(better, margin, self.best, out=self.best)
        for new, old in zip(self.moving.each, self.kept.each, strict=True):
            torch.where(better[:, None], new.detach(), old, out=old)


def _descend(adam: Adam, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient
    adam.step()
    parameter.grad = None  # in the memory of a record it would be held for good
