"""Trees of maxima are one step of a pass, which gives what their nodes give one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from nets import box_around, output_bounds, prepared, samples
from torch import Tensor, nn

from service.bounds.graph import Node
from service.bounds.graph_module import ExecutableGraph
from service.bounds.leaps import trees_of
from service.bounds.linear.plain import PlainRowArithmetic
from service.bounds.linear.row_traversal import RowTraversal
from service.bounds.linear.sharding import Pending
from service.bounds.methods import layers
from service.bounds.network import Network


class Around(nn.Module):
    """A function between two layers that mix all entries."""

    def __init__(self, function: Callable[[Tensor], Tensor], outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Linear(12, 72), nn.Linear(outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.relu(self.first(x)).reshape(-1, 2, 6, 6)
        found: Tensor = self.last(torch.relu(self.function(image).flatten(1) - 0.2))
        return found


POOLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "windows that overlap": (lambda x: nn.functional.max_pool2d(x, 3, 2, 1), 18),
    "windows side by side": (lambda x: nn.functional.max_pool2d(x, 2), 18),
    "the largest of all": (lambda x: x.amax(dim=(2, 3)), 2),
    "maxima of maxima": (lambda x: nn.functional.max_pool2d(nn.functional.max_pool2d(x, 2, 1), 2, 1), 32),
}


def crown(network: Network, box: object, monkeypatch: pytest.MonkeyPatch, *, leaps: bool) -> Tensor:
    with monkeypatch.context() as patch:
        if not leaps:
            patch.setattr(layers, "trees_of", lambda _: {})
        found = output_bounds(network, box, "crown")  # type: ignore[arg-type]
    return torch.cat([found.lower, found.upper])


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_is_one_step_that_gives_the_same_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, met = prepared(Around(*POOLS[name]), 12), Counter[str]()
    propagate = RowTraversal.propagate

    def counting(self: RowTraversal, node: Node, arrived: Pending) -> Iterable[tuple[str, Pending]]:
        assert isinstance(self.arithmetic, PlainRowArithmetic)
        met[node.name] += len(self.arithmetic.backward.relaxations) == len(network.nonlinear)
        return propagate(self, node, arrived)

    monkeypatch.setattr(RowTraversal, "propagate", counting)
    box = box_around(torch.randn(2, 12, generator=torch.Generator().manual_seed(1)), 0.1)
    one_by_one = crown(network, box, monkeypatch, leaps=False)
    trees = trees_of(network)
    assert len(trees) == (2 if name == "maxima of maxima" else 1)
    maxima = [each for tree in trees.values() for each in tree.maxima]
    assert len(maxima) > len(trees)
    assert all(met[each] for each in maxima)
    met.clear()
    torch.testing.assert_close(crown(network, box, monkeypatch, leaps=True), one_by_one, rtol=1e-5, atol=1e-5)
    assert {each for each in maxima if met[each]} == set(trees)


def test_bounds_of_boxes_of_many_sizes_hold() -> None:
    network = prepared(Around(*POOLS["windows that overlap"]), 12)
    for eps in (0.01, 1.0):
        box = box_around(torch.randn(2, 12, generator=torch.Generator().manual_seed(2)), eps)
        found = output_bounds(network, box, "crown")
        with torch.no_grad():
            for x in samples(box, 20, torch.Generator().manual_seed(0)):
                reached = ExecutableGraph(network.graph)(x)
                assert bool((found.lower <= reached + 1e-4).all())
                assert bool((reached <= found.upper + 1e-4).all())


def test_what_is_compared_with_a_constant_or_with_another_value_is_no_tree() -> None:
    clamped = prepared(Around(lambda x: x.clamp(0.1, 0.5), 72), 12)
    assert not trees_of(clamped)
    of_two = prepared(Around(lambda x: torch.maximum(torch.sin(x), torch.cos(x)), 72), 12)
    assert not trees_of(of_two)
