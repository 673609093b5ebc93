"""Score inputs by what their width costs the rows that are still to be proved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.verification.bab.heuristics.input_score import InputScore, InputView


@dataclass(frozen=True)
class RelaxationInfluence(InputScore):
    """Score an input by its influence on the losses of relaxations, as a share of what each open row lacks.

    The slope of the plane times the input's width is a usual score for input splits. But the worse half of a box keeps
    all of what the slope costs, so the slope counts with ``slope_weight`` only, beside the losses of the relaxations,
    which become smaller in both halves. The score is Trivet's own.
    """

    slope_weight: float = 0.1

    def scores(self, view: InputView) -> Tensor:
        smallest = torch.finfo(view.least.dtype).eps
        rows = view.is_open[:, view.specification.disjunct] / view.least.abs().clamp(min=smallest)
        loss = view.planes.influence + self.slope_weight * view.planes.coefficients.abs()
        return torch.bmm(rows.unsqueeze(1), loss.nan_to_num(nan=0.0, posinf=0.0)).squeeze(1)
