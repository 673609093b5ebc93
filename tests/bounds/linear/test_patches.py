"""Rows in patches bound what whole rows bound."""

from __future__ import annotations

import pytest
import torch
from lanes import slow_but_for
from nets import ball_around, output_bounds, prepared, redraw
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.linear.rows import patches as patches_module
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.patches import Patches
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.optimise import Ascent


class Chain(nn.Module):
    """Strides, paddings and dilations, from a flat input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (2, 9, 8)),
            nn.Conv2d(2, 3, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(3, 4, 3, padding=2, dilation=2),
            nn.LeakyReLU(0.1),
            nn.Conv2d(4, 4, 2, stride=(1, 2), groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(3),
        )
        self(torch.zeros(1, 144))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Joined(nn.Module):
    """Two residual blocks, one with a convolution beside it, of a smooth and a bent function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.c, self.side = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(3, 4, 1, stride=2)
        self.last = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.b(torch.tanh(self.a(x))))
        x = torch.relu(self.c(x) - self.side(x))
        y: Tensor = self.last(x.flatten(1))
        return y


CASES = {"chain": (Chain, (144,)), "joined": (Joined, (2, 8, 8))}


@pytest.mark.parametrize("method", slow_but_for(["crown", "alpha-crown"], "crown"))
@pytest.mark.parametrize("case", sorted(CASES))
def test_bounds_are_those_of_whole_rows(case: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = CASES[case]
    module = make().double()
    redraw(module, torch.Generator().manual_seed(1), 1.0)
    network = prepared(module, *shape)
    centre = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    box = Interval(centre - 0.05, centre + 0.05)
    options = BoundOptions(ascent=Ascent(4), elements=3 * 40 * max(node.size for node in network.graph.nodes))
    seen = []
    shown = Patches.of
    monkeypatch.setattr(Patches, "of", lambda self, image: seen.append(1) or shown(self, image))
    found = output_bounds(network, box, method, options)
    assert seen
    monkeypatch.setattr(patches_module, "WORTHWHILE", 0.0)
    expected = output_bounds(network, box, method, options)
    torch.testing.assert_close(found.lower, expected.lower, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.upper, expected.upper, rtol=1e-10, atol=1e-10)


def test_rows_of_each_instances_own() -> None:
    """Patches may stand at other places in each instance."""
    module = Chain().double()
    network = prepared(module, 144)
    centre = torch.randn(2, 144, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    analysis = METHODS["crown"](network, Interval(centre - 0.05, centre + 0.05), BoundOptions())
    start = next(node for node in network.graph.nodes if node.operator == "aten.leaky_relu.default").inputs[0]
    index = torch.tensor([[0, 17, 3], [29, 4, 11]])
    backward = analysis.backward  # type: ignore[attr-defined]
    found = backward.lower_bounds(start, IdentityRows(index))
    whole = IdentityRows(index).dense(network.nodes[start].shape, centre)
    torch.testing.assert_close(found, backward.lower_bounds(start, whole), rtol=1e-10, atol=1e-10)


def test_a_ball_of_flat_images_stays_a_ball() -> None:
    torch.manual_seed(1)
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    image = image.double().requires_grad_(False)
    flat = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), image)
    centre = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    rows = torch.eye(2, dtype=torch.float64)[None]
    found, expected = (
        METHODS["crown"](prepare(module, shape), ball_around(centre.view(1, *shape), 0.5), BoundOptions())
        for module, shape in ((flat, (64,)), (image, (1, 8, 8)))
    )
    assert torch.allclose(found.lower_bounds(rows), expected.lower_bounds(rows))


@pytest.mark.parametrize("instances", [1, 3])
def test_windows_of_all_places_hold_the_rows_own(instances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    image, values = (torch.rand(*shape, generator=generator) for shape in ((3, 2, 8, 10), (instances, 12, 2, 4, 3)))
    place = torch.stack([torch.randint(0, most, (instances, 12), generator=generator) for most in (4, 5)], dim=2)
    patches = Patches(values, place, (4, 5), (2, 2), (-2, -1))
    found = patches.of(image)
    monkeypatch.setattr(patches_module, "FEW", 0)
    assert torch.equal(found, patches.of(image))
