"""The optimizer: element by element, so that it is the same in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from service.training.optimizers import Rule, UpdateGroup
from trivet_example.declared import SignumOptimizer


class Signum(Optimizer):
    def __init__(self, groups: Sequence[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter]["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(momentum.sign(), alpha=-group["lr"])


def signum(config: SignumOptimizer, groups: Sequence[UpdateGroup], device: torch.device) -> list[Rule]:
    optimizer = Signum([group.of_torch() for group in groups], config.momentum)
    return [Rule("signum", optimizer, ("momentum_buffer",), groups)]
