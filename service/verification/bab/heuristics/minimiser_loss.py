"""Scores activations by the loss of a relaxation where the lower bound is attained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from service.verification.bab.heuristics.activation_score import ActivationScore, ActivationView


@dataclass(frozen=True)
class MinimiserLoss(ActivationScore):
    """Score an entry by the loss of its relaxation at the input that minimises the linear bound.

    Hidden values are computed there as if every operator were the line that bounds it. A relaxation that is
    loose elsewhere but exact at the minimiser does not weaken the bound, which BaBSR does not see. The score is
    Trivet's own.
    """

    def scores(self, view: ActivationView) -> Tensor:
        return view.loss_at_minimiser
