"""Signs that passes back through a few layers tell have no rows through all of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from nets import box_around, output_bounds, prepared, samples
from torch import nn

from service.bounds.graph_module import ExecutableGraph
from service.bounds.linear.plain import Pass
from service.bounds.methods import layers
from service.bounds.network import Network

DEPTH = 5


def deep(eps: float) -> tuple[Network, torch.Tensor, float]:
    """A residual net, some of whose signs are open from the second block on."""
    torch.manual_seed(3)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.second(torch.relu(self.first(x))))

    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), *(Block() for _ in range(DEPTH)), nn.Flatten(), nn.Linear(144, 3)
    )
    return prepared(net, 1, 6, 6), torch.randn(2, 1, 6, 6), eps


@pytest.mark.parametrize(
    ("eps", "method"),
    [
        (1e-3, "crown"),
        pytest.param(0.05, "crown", marks=pytest.mark.slow),
        pytest.param(1e-3, "alpha-crown", marks=pytest.mark.slow),
    ],
)
def test_bounds_are_no_wider_than_with_whole_passes_and_hold(
    eps: float, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, x, _ = deep(eps)
    box, rows, bounds = box_around(x, eps), Counter[bool](), Pass.lower_bounds

    def counting(self: Pass, start: str, given: object, own: bool | None = None) -> torch.Tensor:
        found = bounds(self, start, given, own)  # type: ignore[arg-type]
        rows[bool(self.frontier)] += found.shape[1]
        return found

    monkeypatch.setattr(Pass, "lower_bounds", counting)
    whole, all_rows = output_bounds(network, box, method), rows[False]
    rows.clear()
    monkeypatch.setattr(layers, "WORTH_DECIDING", 1)
    found = output_bounds(network, box, method)
    assert bool((found.lower >= whole.lower - 1e-5).all())
    assert bool((found.upper <= whole.upper + 1e-5).all())
    points = samples(box, 100, torch.Generator().manual_seed(0))
    reached = torch.stack([network_output(network, each) for each in points])
    assert bool((found.lower <= reached + 1e-5).all())
    assert bool((reached <= found.upper + 1e-5).all())
    if eps < 0.01:
        assert rows[True]
        assert rows[False] < 0.9 * all_rows


def network_output(network: Network, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = ExecutableGraph(network.graph)(x)
    return found
