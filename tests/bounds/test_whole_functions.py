"""Activations that a model has spelled out are bounded as the operators that they are."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import pytest
import torch
from nets import box_around, output_bounds, prepared
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.graph_module import ExecutableGraph

Function = Callable[[Tensor], Tensor]


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first, self.last = function, nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.function(self.first(x)))
        return found


def cubic(x: Tensor) -> Tensor:
    return sqrt(2 / pi) * (x + 0.044715 * torch.pow(x, 3.0))


SPELLED: dict[str, tuple[Function, str, Function]] = {
    "the older exporter's": (lambda x: x * (torch.erf(x / 1.4142135381698608) + 1) * 0.5, "gelu", functional.gelu),
    "halved first": (lambda x: (x * 0.5) * (1 + torch.erf(0.7071067690849304 * x)), "gelu", functional.gelu),
    "a half inside": (lambda x: x * (0.5 * (1 + torch.erf(x * 0.7071067690849304))), "gelu", functional.gelu),
    "by tanh": (
        lambda x: 0.5 * x * (1 + torch.tanh(cubic(x))), "gelu", lambda x: functional.gelu(x, approximate="tanh")
    ),
    "a cube of products": (
        lambda x: x * 0.5 * (torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)) + 1),
        "gelu",
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    "of a multiple": (lambda x: 2 * functional.gelu(2 * x), "gelu", lambda x: 2 * functional.gelu(2 * x)),
    "a swish": (lambda x: x * torch.sigmoid(x), "silu", functional.silu),
    "a quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), "silu", lambda x: functional.silu(1.702 * x) / 1.702),
    "mish": (lambda x: x * torch.tanh(functional.softplus(x)), "mish", functional.mish),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_it_has_one_operator_and_its_bounds(name: str) -> None:
    spelled, operator, whole = SPELLED[name]
    network, expected = prepared(Of(spelled), 3), prepared(Of(whole), 3)
    operators = [node.operator for node in network.nonlinear]
    assert operators == [f"aten.{operator}.default"]
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ExecutableGraph(network.graph)(x), Of(spelled)(x), rtol=1e-5, atol=1e-6)
    box = box_around(x, 0.3)
    found, known = (output_bounds(each, box, "crown") for each in (network, expected))
    torch.testing.assert_close(found.lower, known.lower, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.upper, known.upper, rtol=1e-4, atol=1e-5)


LIKE: dict[str, Function] = {
    "another constant": lambda x: x * (torch.erf(x / 1.4) + 1) * 0.5,
    "another offset": lambda x: x * (torch.erf(x / sqrt(2)) + 1.01) * 0.5,
    "a gate of another value": lambda x: x * torch.sigmoid(x.flip(1)),
    "a falling gate": lambda x: x * torch.sigmoid(-x),
    "another cube": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3))),
}


@pytest.mark.parametrize("name", LIKE)
def test_what_only_looks_like_one_is_bounded_as_it_is(name: str) -> None:
    network = prepared(Of(LIKE[name]), 3)
    assert "trivet.product" in {node.operator for node in network.nonlinear}
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ExecutableGraph(network.graph)(x), Of(LIKE[name])(x), rtol=1e-5, atol=1e-6)


def test_in_float64_the_model_keeps_its_own_constants() -> None:
    network = prepared(Of(SPELLED["the older exporter's"][0]).double(), 3)
    assert "aten.erf.default" in {node.operator for node in network.nonlinear}
