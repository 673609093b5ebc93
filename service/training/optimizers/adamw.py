"""AdamW: one kernel for all parameters on CUDA, one call per operation elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import AdamW

from service.jobs.spec import optimizer as specs
from service.training.optimizers.base import Rule, UpdateGroup


def adamw(config: specs.AdamWConfig, groups: Sequence[UpdateGroup], device: torch.device) -> list[Rule]:
    """Return the one rule of a job whose optimizer is AdamW."""
    return [adamw_rule(groups, config.betas, config.eps, device)]


def adamw_rule(groups: Sequence[UpdateGroup], betas: tuple[float, float], eps: float, device: torch.device) -> Rule:
    """Return AdamW over ``groups``."""
    how: dict[str, Any] = {"fused" if device.type == "cuda" else "foreach": True}
    optimizer = AdamW([group.of_torch() for group in groups], betas=betas, eps=eps, **how)
    return Rule("adamw", optimizer, ("exp_avg", "exp_avg_sq"), groups)
