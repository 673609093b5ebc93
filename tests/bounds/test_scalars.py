"""Values of one number for each instance, as a critic's or the largest of all entries, go through any operator."""

from __future__ import annotations

import pytest
import torch
from nets import box_around, output_bounds, prepared, samples
from rigorous_problems import above, subject
from torch import Tensor, nn

from service.bounds.methods import ALPHA_CROWN, CROWN, CROWN_IBP, IBP, BoundOptions, Method
from service.bounds.optimise import Ascent
from service.verification.bab.driver import decide
from service.verification.verdict import Verdict


class Critic(nn.Module):
    """Functions, products and comparisons of numbers, and of numbers with constants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.tanh(self.first(x).squeeze(-1)), torch.relu(self.second(x).squeeze(-1) + 0.5)
        both = torch.maximum(first * second, second) / (1 + second * second)
        found: Tensor = x * (both + first.new_full(first.shape, 0.5)).clamp(-0.5, 2.0).unsqueeze(-1)
        return found


@pytest.mark.parametrize("method", ["ibp", "crown", "alpha-crown"])
def test_points_lie_within_bounds(method: str) -> None:
    module, x = Critic().eval(), torch.tensor([[0.3, -0.2, 0.5], [-1.0, 0.1, 0.0]])
    box = box_around(x, 0.4)
    found = output_bounds(prepared(module, 3), box, method)
    share = torch.rand(500, 1, 3, generator=torch.Generator().manual_seed(1))
    met = module((box.lower + share * (box.upper - box.lower)).reshape(-1, 3)).detach().reshape(500, 2, 3)
    assert bool((found.lower <= met.amin(dim=0) + 1e-6).all())
    assert bool((found.upper >= met.amax(dim=0) - 1e-6).all())
    assert bool((found.width < 10).all())


class Extremes(nn.Module):
    """A value of one number among others, as an ONNX ``ReduceMax`` without ``keepdims`` leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        total = h.sum(dim=1)
        found: Tensor = torch.relu(total) + torch.tanh(total * h.amax(dim=1)) + torch.floor(total).clamp(-1, 1)
        return found


@pytest.mark.parametrize("method", [IBP, CROWN_IBP, CROWN, ALPHA_CROWN], ids=lambda each: each.name)
def test_an_output_of_one_number_has_rigorous_bounds(method: Method) -> None:
    module = Extremes().double().eval()
    network, box = prepared(module, 3), box_around(torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64), 0.4)
    rows = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    found = method.rigorous(network, box, BoundOptions(ascent=Ascent(iterations=2))).lower_bounds(rows)[0]
    met = module(samples(box, 500, torch.Generator().manual_seed(1)).reshape(-1, 3)).detach()
    assert found[0] <= met.min()
    assert -found[1] >= met.max()
    assert bool(-found[1] - found[0] < 10)


@pytest.mark.parametrize("rigorous", [False, True])
def test_a_search_decides_about_one_number(rigorous: bool) -> None:
    model = subject(nn.Sequential(nn.Linear(3, 3), Extremes()), 3, torch.float64, rigorous=rigorous)
    decision = decide(model, above(3, 0.5, 1e3), CROWN, 5.0, restarts=0)
    assert decision.verdict is Verdict.VERIFIED
