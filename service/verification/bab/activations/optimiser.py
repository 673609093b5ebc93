"""Gradient ascent of the parameters of many domains at once."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from service.bounds.buffers import fits, overwrite, own_copy
from service.bounds.fused import Adam
from service.bounds.replay import Repeat
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DomainBatch, DualObjective, DualParameters
from service.verification.bab.settings import OptimiserSettings


class _MultiplierAdam:
    """Adam (Kingma and Ba, 2015) for the multipliers β, each at a rate of its own.

    One that would change its sign stops at the kink. All state is in tensors that stay where they are.
    """

    def __init__(self, like: Tensor, settings: OptimiserSettings) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.count = torch.zeros(1, dtype=torch.int64, device=like.device)
        steps = torch.arange(1, settings.iterations + 1, dtype=torch.float64)
        (first, second), self.epsilon = settings.adam_decays, settings.adam_epsilon
        self.decays = first, second
        sizes = settings.multiplier_step * (1 - second**steps).sqrt() / (1 - first**steps) * settings.decay**steps
        self.sizes = sizes.to(like)

    def restart(self) -> None:
        for each in (self.first, self.second, self.count):
            each.zero_()

    def step(self, values: Tensor, gradient: Tensor, rates: Tensor) -> None:
        first, second = self.decays
        self.first.lerp_(gradient, 1 - first)
        self.second.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        moved = self.first / self.second.sqrt().add_(self.epsilon)
        moved.mul_(rates).mul_(self.sizes.index_select(0, self.count))
        torch.sub(values, moved, out=moved)
        values.copy_(moved.masked_fill_(values * moved < 0, 0))
        self.count += 1


class DomainOptimiser:
    """Optimises batches of as many domains as the first, one after the other, in tensors that stay in place.

    ``stepping`` repeats an iteration, ``looking`` the last look at its result.
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
        self.slopes = Adam([self.moving.slopes], settings.slope_step, settings.decay)
        self.beta = _MultiplierAdam(domains.beta, settings)
        self.weights = Adam([self.moving.weights], settings.weight_step, settings.decay)

    def keep(self) -> None:
        """Copy what does not change into tensors of its own, so that :meth:`restart` may overwrite it."""
        self.batch = own_copy(self.batch)

    def takes(self, batch: DomainBatch) -> bool:
        """Return whether these domains have the same form."""
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
        total, every = self.settings.iterations, self.settings.check_every
        for done in range(0, total, every):
            self.stepping.run(self._step, min(every, total - done))
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
    parameter.grad = None  # a record would hold it for good
