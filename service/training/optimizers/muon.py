"""Muon (Jordan et al., 2024): momentum that is orthogonalised, over matrices that any layout divides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from service.jobs.plugins import matches
from service.jobs.spec import optimizer as specs
from service.models.full_weights import own_slices, whole_tensor
from service.parallel.tensor.placement import local
from service.training.optimizers.adamw import adamw_rule
from service.training.optimizers.base import Rule, UpdateGroup

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration: its slope at zero is the largest that still converges about 1."""
_EPS = 1e-7


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Return about ``U·Vᵀ`` of ``matrix = U·S·Vᵀ``, by Newton-Schulz iterations in bf16, as ``torch.optim.Muon``."""
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


def adjusted(rate: float, adjust: str, rows: int, columns: int) -> float:
    """Return the rate for a matrix of this shape."""
    if adjust == "original":
        return rate * math.sqrt(max(1, rows / columns))
    return rate * 0.2 * math.sqrt(max(rows, columns))


class Muon(Optimizer):
    """Updates matrices of which a rank may hold a part: their momentum is gathered, one matrix at a time, and every
    rank that holds a part orthogonalises the whole. Rows of padding are left out.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], config: specs.MuonConfig, rows: dict[int, int]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._config, self._rows = config, rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; state begins at zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, rate: float, decay: float) -> None:
        config, momentum = self._config, self.state[parameter]["momentum_buffer"]
        local(momentum).lerp_(local(parameter.grad), 1 - config.momentum)  # type: ignore[arg-type]
        followed = momentum
        if config.nesterov:
            followed = parameter.grad.lerp(momentum, config.momentum)  # type: ignore[union-attr]
        rows, columns = self._rows.get(id(parameter), parameter.shape[0]), parameter.shape[1]
        update = orthogonal(whole_tensor(followed)[:rows], config.iterations)
        update = functional.pad(update, (0, 0, 0, parameter.shape[0] - rows))
        own = local(parameter)
        own.mul_(1 - rate * decay)
        own.add_(update[own_slices(parameter)], alpha=-adjusted(rate, config.adjust, rows, columns))


def muon(config: specs.MuonConfig, groups: Sequence[UpdateGroup], device: torch.device) -> list[Rule]:
    """Return Muon for matrices, and AdamW for what its patterns name and for all else."""
    others = config.adamw
    apart = [group.split(lambda name, value: value.dim() != 2 or matches(name, others.match)) for group in groups]
    mine = [rest for _, rest in apart if rest.parameters]
    theirs = [
        replace(part, lr=part.lr / config.lr * others.lr, weight_decay=part.own_decay(others.weight_decay))
        for part, _ in apart
        if part.parameters
    ]
    rules = []
    if mine:
        rows = {id(value): group.rows[name] for group in mine for name, value in group.parameters if name in group.rows}
        optimizer = Muon([group.of_torch() for group in mine], config, rows)
        rules.append(Rule("muon", optimizer, ("momentum_buffer",), mine, counts=False))
    if theirs:
        rules.append(adamw_rule(theirs, others.betas, others.eps, device))
    return rules
