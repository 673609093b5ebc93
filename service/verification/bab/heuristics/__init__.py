"""Defines branching heuristics, which choose the activation or the input at which an open subproblem is split.

A score is one file and one line in a table: :data:`ACTIVATION_SCORES` for searches that split activations,
:data:`INPUT_SCORES` for searches that split inputs. :class:`Heuristics` holds a search's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.verification.bab.heuristics.activation_score import ActivationScore, ActivationView
from service.verification.bab.heuristics.babsr import Babsr
from service.verification.bab.heuristics.input_score import InputScore, InputView
from service.verification.bab.heuristics.minimiser_loss import MinimiserLoss
from service.verification.bab.heuristics.relaxation_influence import RelaxationInfluence

ACTIVATION_SCORES: Mapping[str, ActivationScore] = {"babsr": Babsr(), "minimiser-loss": MinimiserLoss()}
INPUT_SCORES: Mapping[str, InputScore] = {"relaxation-influence": RelaxationInfluence()}


@dataclass(frozen=True)
class Heuristics:
    """The scores that one search branches by.

    Each score of ``activations`` nominates a few entries of every subproblem; real bounds of both halves decide
    between the nominated (filtered smart branching), or the first score if these bounds show no gain. ``inputs``
    alone decides which input is split.
    """

    activations: tuple[ActivationScore, ...] = tuple(ACTIVATION_SCORES.values())
    inputs: InputScore = INPUT_SCORES["relaxation-influence"]


__all__ = [
    "ACTIVATION_SCORES",
    "INPUT_SCORES",
    "ActivationScore",
    "ActivationView",
    "Heuristics",
    "InputScore",
    "InputView",
]
