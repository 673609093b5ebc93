"""Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from service.jobs.spec import optimizer as specs
from service.parallel.tensor.placement import local
from service.training.optimizers.base import Rule, UpdateGroup


class Lion(Optimizer):
    """``θ ← θ − lr·(sign(β₁·m + (1 − β₁)·g) + λ·θ)``, then ``m ← β₂·m + (1 − β₂)·g``, element by element."""

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; state begins at zero."""
        for group in self.param_groups:
            (old, kept), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own, gradient = local(parameter), local(parameter.grad)
                momentum = local(self.state[parameter]["exp_avg"])
                own.mul_(1 - rate * group["weight_decay"])
                own.add_(torch.lerp(gradient, momentum, old).sign_(), alpha=-rate)
                momentum.lerp_(gradient, 1 - kept)


def lion(config: specs.LionConfig, groups: Sequence[UpdateGroup], device: torch.device) -> list[Rule]:
    """Return the one rule of a job whose optimizer is Lion."""
    return [
        Rule("lion", Lion([group.of_torch() for group in groups], config.betas), ("exp_avg",), groups, counts=False)
    ]
