"""Any model that calls torch's functional collectives is bounded as the whole function that its ranks compute."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from meshes import start_mesh
from nets import box_around, output_bounds, redraw
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import all_reduce

from service.bounds.graph import UnsupportedModelError
from service.bounds.network import prepare
from service.bounds.rank_group import RankGroup
from service.parallel import distributed

pytestmark = pytest.mark.distributed

FIXED = "alpha-crown (fixed intermediate bounds)"
METHODS = ["ibp", "crown-ibp", "crown", "alpha-crown", FIXED]
gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class Whole(nn.Module):
    """The function of all ranks, in one process."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"a": (8, 6), "b": (6, 8), "c": (8, 6), "d": (8, 8), "e": (10, 8), "f": (4, 10)}
        self.weights = nn.ParameterDict({name: torch.empty(shape) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = (self.weights[name] for name in "abcdef")
        x = torch.relu(x + torch.relu(x @ a.T) @ b.T)
        x = torch.tanh(torch.sigmoid(x @ c.T) @ d.T)
        return torch.relu(torch.sin(x) @ e.T) @ f.T


class Divided(Whole):
    """Written by hand: nothing says where a value begins to be used for work that differs by rank."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        rank = dist.get_rank()
        cut = {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0, "f": 1}
        self.weights = nn.ParameterDict({name: whole.weights[name].chunk(2, cut[name])[rank] for name in cut})

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = (self.weights[name] for name in "abcdef")
        group, rank = dist.group.WORLD, dist.get_rank()
        x = torch.relu(x + all_reduce(torch.relu(x @ a.T) @ b.T, "sum", group))
        x = torch.tanh(scatter(torch.sigmoid(x @ c.T) @ d.T, "sum", 1, group))
        x = gather(x, -1, group)
        x = gather(torch.sin(x.chunk(2, dim=1)[rank]), 1, group)
        y = torch.relu(x @ e.T) @ f.T
        dist.all_reduce(y)
        return y


class Unreduced(nn.Module):
    """A largest value over the ranks, which no bounds go through."""

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(x * (dist.get_rank() + 1), "max", dist.group.WORLD)


def bound() -> dict[str, Any]:
    """Return by method how far bounds are from those of one process, in units of the largest."""
    axis = start_mesh(tp=2).tp
    generator = torch.Generator().manual_seed(3)
    whole = Whole().double()
    redraw(whole, generator, scale=1.5)
    divided = Divided(whole).requires_grad_(False)
    box = box_around(torch.randn(4, 6, generator=generator, dtype=torch.float64), 0.1)
    networks = prepare(whole.requires_grad_(False), (6,)), prepare(divided, (6,), axis)
    found: dict[str, Any] = {"same": float((whole(box.centre) - divided(box.centre)).abs().max())}

    def difference(method: str) -> float:
        one, other = (output_bounds(network, box, method) for network in networks)
        return max(
            float((a - b).abs().max() / a.abs().max()) for a, b in ((one.lower, other.lower), (one.upper, other.upper))
        )

    for method in METHODS:
        found[method] = difference(method)
    with patch.object(RankGroup, "join", RankGroup.gather):
        found["no adjoint"] = difference(FIXED)
    try:
        prepare(Unreduced(), (3,), axis)
    except UnsupportedModelError as error:
        found["refused"] = str(error)
    distributed.stop()
    return found


@pytest.mark.slow
def test_a_model_written_with_functional_collectives_has_the_bounds_of_one_process(torchrun: Any) -> None:
    for found in torchrun(bound, 2):
        assert found.pop("same") < 1e-12
        assert "expected 'sum' or 'avg'" in found.pop("refused")
        assert found.pop("no adjoint") > 1e-3, "optimised bounds need the collectives' adjoints"
        assert {method: value for method, value in found.items() if not value <= 1e-9} == {}
