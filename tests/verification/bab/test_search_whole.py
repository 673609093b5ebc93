"""Models without any activation: their bounds are exact, and nothing can be split."""

from __future__ import annotations

import pytest
import torch
from lanes import slow_but_for
from torch import nn

from service.bounds.methods import CROWN
from service.bounds.network import prepare
from service.formats.vnnlib import Disjunct, Halfspace, L2Ball, Query
from service.verification.bab.decision import Technique
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.engine import PLAIN, RIGOROUS, NetworkEngine
from service.verification.verdict import Verdict

FEATURES = 70


@pytest.mark.parametrize("rigorous", slow_but_for([False, True], True))
@pytest.mark.parametrize("ball", [False, True])
def test_affine_models_are_decided_next_to_their_exact_minimum(ball: bool, rigorous: bool) -> None:
    torch.manual_seed(0)
    last = nn.Linear(FEATURES, 2)
    module = nn.Sequential(nn.Unflatten(1, (7, 10)), nn.Flatten(), last).double()
    module.requires_grad_(False)
    subject = ModelUnderVerification(
        module,
        NetworkEngine(prepare(module, (FEATURES,)), RIGOROUS if rigorous else PLAIN),
        module,
        None,
        torch.float64,
    )
    weight, bias = last.weight[0], float(last.bias[0])
    least = bias - float(weight.norm() if ball else weight.abs().sum())
    within = L2Ball((0.0,) * FEATURES, 1.0) if ball else None
    for above, verdict in ((1e-3, Verdict.FALSIFIED), (-1e-3, Verdict.VERIFIED)):
        case = Disjunct((-1.0,) * FEATURES, (1.0,) * FEATURES, (Halfspace(((0, 1.0),), least + above),))
        decision = decide(subject, Query(FEATURES, 2, (case,), within), CROWN, 20.0)
        assert decision.verdict is verdict
        assert decision.verdict is Verdict.FALSIFIED or decision.technique in {Technique.BOUNDS, Technique.ACTIVATIONS}
        assert decision.verdict is Verdict.FALSIFIED or decision.bound == pytest.approx(1e-3, rel=1e-3)
