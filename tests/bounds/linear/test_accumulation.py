"""Coefficients are added in place where nothing else holds them, and go only where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from nets import prepared
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.linear.row_traversal import RowTraversal
from service.bounds.methods import CROWN, BoundOptions
from service.bounds.operators import NONLINEAR


class Module(nn.Module):
    """A function of a flat input with weights of its own."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def pooled(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    image = first(x.reshape(-1, 1, 6, 6))
    found: Tensor = last(nn.functional.max_pool2d(image, 3, 2, 1).flatten(1))
    return found


def residual(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    image = first(x.reshape(-1, 1, 6, 6))
    found: Tensor = torch.relu(second(torch.relu(image)) + image).flatten(1)
    return found


def selected(x: Tensor, first: nn.Module) -> Tensor:
    y = torch.tanh(first(x))
    places = torch.tensor([5, 1, 1, 30])
    return y[:, 2:20:3] * 2 + y[:, 20:26] - y[:, 30:36] + y.index_select(1, places).sum(dim=1, keepdim=True)


NETS = {
    "a max pool": Module(pooled, nn.Conv2d(1, 3, 3, padding=1), nn.Linear(27, 4)),
    "a residual block": Module(residual, nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)),
    "slices and selections": Module(selected, nn.Linear(36, 36)),
}


def bounds(net: nn.Module) -> Tensor:
    torch.manual_seed(0)
    network = prepared(net, 36)
    centre = torch.randn(2, 36)
    size = network.graph.output.size
    rows = torch.cat([torch.eye(size), -torch.eye(size)]).reshape(1, 2 * size, *network.graph.output.shape)
    return CROWN(network, Interval(centre - 0.2, centre + 0.2), BoundOptions()).lower_bounds(rows)


@pytest.mark.parametrize("name", slow_but_for(NETS, "a residual block"))
def test_bounds_are_those_of_sums_that_are_made_anew(name: str) -> None:
    """With gradients enabled nothing is changed in place."""
    torch.manual_seed(1)
    with torch.no_grad():
        found = bounds(NETS[name])
    with torch.enable_grad():
        expected = bounds(NETS[name])
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_nothing_goes_to_what_only_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of two operands is read by their maximum alone, which has no coefficients on it."""
    passed = Counter[str]()
    propagate = RowTraversal.propagate

    def counting(self: Any, node: Any, arrived: Any) -> Iterable[Any]:
        passed[node.operator] += 1
        return propagate(self, node, arrived)

    monkeypatch.setattr(RowTraversal, "propagate", counting)
    network = prepared(nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.MaxPool2d(2), nn.Flatten()), 36)
    centre = torch.randn(1, 36)
    analysis = CROWN(network, Interval(centre - 0.2, centre + 0.2), BoundOptions())
    passed.clear()
    analysis.lower_bounds(torch.eye(9).reshape(1, 9, *network.graph.output.shape))
    assert passed["trivet.maximum"]
    assert not passed["aten.sub.Tensor"]


@pytest.mark.parametrize("operator", [name for name, each in NONLINEAR.items() if each.deciding])
def test_relaxations_have_no_coefficients_on_what_only_decides(operator: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "trivet.maximum": lambda x: torch.maximum(x, x.flip(1)),
        "trivet.choice": lambda x: torch.where(x > 0, x * 2, x - 1),
    }
    network = prepared(Module(functions[operator]), 5)
    node = next(each for each in network.nonlinear if each.operator == operator)
    ends = [Interval(-torch.rand(2, *shape), torch.rand(2, *shape)) for shape in node.input_shapes]
    onto, _ = network.operator_of(node).relax_on(node, ends).backward(torch.randn(2, 3, *node.shape))
    assert all(not onto[index].any() for index in network.operator_of(node).deciding)


def test_a_selection_of_entries_evenly_apart_is_a_slice() -> None:
    taken = torch.tensor([1, 3, 5]), torch.tensor([4, 0, 2])
    network = prepared(Module(lambda x: x.index_select(1, taken[0]) + x.index_select(1, taken[1])), 6)
    operators = Counter(node.operator for node in network.graph.nodes)
    assert operators["aten.slice.Tensor"] == 1
    assert operators["aten.index_select.default"] == 1
    box = Interval(torch.zeros(1, 6), torch.arange(6.0)[None])
    found = CROWN(network, box, BoundOptions()).lower_bounds(-torch.eye(3)[None])
    assert (-found).tolist() == [[5.0, 3.0, 7.0]]
