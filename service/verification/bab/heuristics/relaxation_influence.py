"""Scores inputs by the loss that their width causes in unproved rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.verification.bab.heuristics.input_score import InputScore, InputView


@dataclass(frozen=True)
class RelaxationInfluence(InputScore):
    """Score an input by its influence on the losses of relaxations, as a share of each open row's gap.

    The slope of the plane times the input's width is a usual score for input splits. But the worse half of a box keeps
    the slope's whole loss, so the slope counts with ``slope_weight`` only, beside the losses of the relaxations, which
    shrink in both halves. The score is Trivet's own.
    """

    slope_weight: float = 0.1

    def scores(self, view: InputView) -> Tensor:
        smallest = torch.finfo(view.least.dtype).eps
        rows = view.is_open[:, view.specification.disjunct] / view.least.abs().clamp(min=smallest)
        loss = view.planes.influence + self.slope_weight * view.planes.coefficients.abs()
        return torch.bmm(rows.unsqueeze(1), loss.nan_to_num(nan=0.0, posinf=0.0)).squeeze(1)
