"""Scores activations by the loss of a relaxation where it is loosest (BaBSR)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from service.verification.bab.heuristics.activation_score import ActivationScore, ActivationView


@dataclass(frozen=True)
class Babsr(ActivationScore):
    """Score an entry by the loss of its relaxation in the bound, at the point where it would be split.

    For a ReLU that point is the kink, and the loss is the intercept of the upper line times the coefficient that
    arrives, as in BaBSR (Bunel et al., "Branch and Bound for Piecewise Linear Neural Network Verification", 2020);
    smooth activations are treated as GenBaB does (Shi et al., 2025), by the loss at their split point.
    """

    def scores(self, view: ActivationView) -> Tensor:
        return view.loss_at_split_points
