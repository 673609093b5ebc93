"""Models and limits for the tests of little memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from limited_memory import OPTIMISTIC, LimitedMemory
from nets import mlp
from search_problems import model_from
from torch import nn

from service.bounds.memory import (
    MemoryBudget,
)
from service.bounds.methods import BoundOptions
from service.verification.bab.model import ModelUnderVerification

CPU = torch.device("cpu")
WIDTHS = [6, 160, 160, 2]
"""Of a network whose weights take more than what is done with a few rows."""


LIMITS = [1000.0, 32.0, 8.0, 4.0]
"""As multiples of the model's size."""


def budget_of(limited: LimitedMemory, *, honest: bool) -> MemoryBudget:
    """That knows what is free, or whose plans fail since it does not."""
    return MemoryBudget(meter=limited) if honest else OPTIMISTIC


def dense(seed: int = 0) -> nn.Module:
    return mlp(WIDTHS, nn.ReLU(), seed).eval().requires_grad_(False)


def on(module: nn.Module, limited: LimitedMemory, *, honest: bool) -> ModelUnderVerification:
    subject = model_from(module, WIDTHS[0])
    return replace(subject, options=BoundOptions(memory=budget_of(limited, honest=honest)))
