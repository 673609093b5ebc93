"""The model itself over its stages: values down the line, their gradients against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from service.bounds.stages.link import StageLink


class InStages(nn.Module):
    """The model of which each rank of ``line`` has a stage.

    Every rank calls it with a batch of the model's inputs and has the model's outputs, and the inputs' gradient where
    that is asked for: from all ranks at the same point, with the same gradient of the outputs.
    """

    def __init__(self, stage: nn.Module, line: StageLink) -> None:
        super().__init__()
        self.stage, self.line = stage, line

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            found: Tensor = _Across.apply(x, self)  # type: ignore[no-untyped-call]
            return found
        return self.passed_on(self.entering(x))[1]

    def entering(self, x: Tensor) -> Tensor:
        """Return the stage's own input."""
        return x if self.line.is_first else self.line.from_previous()

    def passed_on(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stage's output, and that of the last."""
        y: Tensor = self.stage(own)
        if not self.line.is_last:
            self.line.to_next(y)
        return y, self.line.of_last(y)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: InStages) -> Tensor:
        ctx.line = model.line
        with torch.enable_grad():
            ctx.own = model.entering(x).detach().requires_grad_()
            ctx.end, outputs = model.passed_on(ctx.own)
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        line: StageLink = ctx.line
        if not line.is_last:
            gradient = line.from_next()
        (own,) = torch.autograd.grad(ctx.end, ctx.own, gradient)
        if not line.is_first:
            line.to_previous(own)
        return line.of_first(own), None
