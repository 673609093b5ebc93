"""Backward passes have rows only for entries that the output depends on and that a row may bound better."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nets import prepared
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.interval import Interval
from service.bounds.methods import CROWN, BoundOptions
from service.bounds.methods.layers import PlainLayers
from service.bounds.methods.passes import Passes
from service.bounds.methods.record import Noted
from service.bounds.network import Network

TOKENS, WIDTH = 5, 4


class Gated(nn.Module):
    """A product of a bent value, moved about, and a linear one; ReLU knows some signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.up = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        gate = functional.silu(self.gate(hidden)).transpose(1, 2)[:, :, 1:]
        found: Tensor = (2 * gate * self.up(hidden).transpose(1, 2)[:, :, 1:]).sum(dim=2) * hidden.sum(dim=1).exp()
        return found


class FirstToken(nn.Module):
    """Attention, and what follows of the first token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        x = self.norm(x + self.down(functional.gelu(self.up(x))))
        return x[:, 0]


def made(module: Callable[[], nn.Module]) -> tuple[Network, Interval]:
    torch.manual_seed(0)
    network, x = prepared(module().eval(), TOKENS, WIDTH), torch.randn(2, TOKENS, WIDTH)
    return network, Interval(x - 0.05, x + 0.05)


def bounded(network: Network, box: Interval) -> tuple[Tensor, dict[str, int]]:
    """Return bounds of all outputs from both sides, and how many rows each value had."""
    assert isinstance(CROWN.plain, Passes)
    noted, identity = Noted(), torch.eye(network.graph.output.size)
    with torch.no_grad():
        analysis = CROWN.plain.bounded(network, box, BoundOptions(), noted)
        found = analysis.lower_bounds(torch.cat([identity, -identity])[None])
    return found, {name: rows.count for name, rows in noted.found.items()}


def test_a_function_of_one_bounded_entry_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    network, box = made(Gated)
    found, rows = bounded(network, box)
    monkeypatch.setattr(PlainLayers, "_settled_through", lambda *_: None)
    everything, all_rows = bounded(network, box)
    without = {name for name, count in rows.items() if count < all_rows[name]}
    assert {network.nodes[name].operator for name in without} >= {"aten.mul.Tensor"}
    assert not any(rows[name] for name in without)
    assert bool((found >= everything - 1e-5).all())


def test_an_entry_that_only_intervals_bound_has_rows_where_another_node_reads_it() -> None:
    """ReLU asks for no rows where a sign is known; the product behind it does."""
    torch.manual_seed(0)

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(self.second(functional.relu(self.first(x)))).square()

    network, x = prepared(Squared(), 3), torch.randn(1, 3)
    _, rows = bounded(network, Interval(x - 0.1, x + 0.1))
    relu, square = network.nonlinear[1:]
    interval = CROWN(network, Interval(x - 0.1, x + 0.1), BoundOptions()).inputs[relu.name][0]
    positive = int((interval.lower > 0).sum())
    assert positive
    assert rows[relu.inputs[0]] + rows[square.inputs[0]] >= positive


def test_entries_that_the_output_does_not_depend_on_have_no_rows() -> None:
    network, box = made(FirstToken)
    found, rows = bounded(network, box)
    network.__dict__["needed"] = {}  # what is kept of the property, as if everything mattered
    everything, all_rows = bounded(network, box)
    assert torch.allclose(found, everything, rtol=0, atol=1e-5)
    assert sum(rows.values()) < 0.6 * sum(all_rows.values())
    (gelu,) = (node for node in network.nonlinear if node.operator == "aten.gelu.default")
    assert (rows[gelu.inputs[0]], all_rows[gelu.inputs[0]]) == (8, 8 * TOKENS)


def test_all_entries_of_a_plain_net_are_needed() -> None:
    network = prepared(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 3)
    assert network.needed == {}
