"""The objective: what is minimised, and what evaluation reports."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from service.objectives import Objective, ObjectiveContext
from trivet_example.declared import HingeObjective


class Hinge(Objective):
    measures = 2

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.multi_margin_loss(outputs.float(), targets, margin=self.margin)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.multi_margin_loss(outputs.float(), targets, margin=self.margin, reduction="sum")
        return torch.stack((loss.double(), (outputs.argmax(-1) == targets).sum().double()))

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        loss, correct = (totals / samples).tolist()
        return {"eval_hinge": loss, "eval_accuracy": correct}


def hinge(config: HingeObjective, context: ObjectiveContext) -> Objective:
    return Hinge(config.margin)
