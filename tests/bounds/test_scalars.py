"""Values of one number for each instance, as a critic's or the largest of all entries, go through any operator."""

from __future__ import annotations

import pytest
import torch
from nets import box_around, output_bounds, prepared
from torch import Tensor, nn


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
