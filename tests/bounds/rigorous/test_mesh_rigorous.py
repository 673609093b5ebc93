"""Rigorous bounds on tensor-parallel ranks, against rational numbers and against those of one process."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigorous_ranks import (
    LOOSER,
    Exact,
    above_values,
    bounds_of,
    check_searches,
    mlps,
    outside,
    positive,
    rational,
    searches,
)
from torch import Tensor, nn

from service.bounds.linear.rigorous import RoundedTerms, _with_parts

pytestmark = pytest.mark.distributed


class Ladder(nn.Module):
    """Every collective: tokens divided over the ranks, gathered, and a block whose two ends are replicated."""

    def __init__(self, axis: Any) -> None:
        from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear, SequenceSharded

        super().__init__()
        self.axis, self.stream = axis, SequenceSharded(axis)
        self.into = ColumnParallelLinear(3, 8, axis, copied_input=True)
        self.out = RowParallelLinear(8, 3, axis, bias=False, partial_output=True)
        self.column, self.row = ColumnParallelLinear(3, 8, axis), RowParallelLinear(8, 3, axis)

    def forward(self, x: Tensor) -> Tensor:
        from service.parallel.collectives import gather_from_group

        x = self.stream.divide(x)
        x = torch.relu(x + self.stream.leave(self.out(torch.relu(self.into(self.stream.enter(x))))))
        if self.axis.size > 1:
            x = gather_from_group(x, 1, self.axis.group, self.axis.size)
        return x + self.row(torch.relu(self.column(x)))

    def exactly(self, x: Any) -> Any:
        w = {name: rational(each) for name, each in self.named_parameters()}
        inner = positive(x @ w["into.weight"].T + w["into.bias"]) @ w["out.weight"].T
        x = positive(x + inner)
        return x + positive(x @ w["column.weight"].T + w["column.bias"]) @ w["row.weight"].T + w["row.bias"]


def ladders(mesh: Any) -> tuple[nn.Module, nn.Module, Exact, tuple[int, ...]]:
    from divided_tensors import copy_parts
    from nets import redraw

    from service.parallel.mesh import SINGLE

    whole, divided = Ladder(SINGLE).double(), Ladder(mesh.tp).double()
    redraw(whole, torch.Generator().manual_seed(5), scale=30)
    copy_parts(whole, divided, mesh.tp)
    return whole, divided, whole.exactly, (4, 3)


CASES = [(0.0, "crown"), *((0.1, method) for method in ("ibp", "crown-ibp", "crown"))]
OPTIMISED = "shards at the head"


def compare() -> dict[str, dict[str, Any]]:
    """How often exact values leave bounds, and how much looser these are than one process's."""
    from meshes import start_mesh
    from nets import box_around

    from service.bounds.network import prepare
    from service.parallel import distributed

    mesh = start_mesh(tp=2)
    nets = {"every collective": lambda: ladders(mesh), OPTIMISED: lambda: mlps(mesh, 12, 10, 12)}
    found: dict[str, dict[str, Any]] = {}
    for name, make in nets.items():
        whole, divided, exactly, shape = make()
        networks = prepare(divided, shape, mesh.tp), prepare(whole, shape)
        assert any(networks[0].is_own(node.name) for node in networks[0].nonlinear)
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for radius, method in [*CASES, *([(0.1, "alpha-crown")] if name == OPTIMISED else [])]:
            box = box_around(x, radius)
            corners = (torch.rand(4, *shape, generator=torch.Generator().manual_seed(2)) < 0.5).unbind()
            points = [torch.where(corner, box.upper[0], box.lower[0]) for corner in corners]
            ours, expected = (bounds_of(network, box, method) for network in networks)
            widths = [float((upper - lower).mean()) for lower, upper in (ours, expected)]
            found[f"{name}, {method}, {radius}"] = {
                "outside": outside(ours, exactly, points),
                "looser": widths[0] / widths[1] - 1,
                "width": widths[0] / float(expected.abs().max()),
                "bounds": ours.tolist(),
            }
        found[f"{name}, other forms"] = other_forms(networks[0], box, exactly, points)
    found["cancelling"] = cancelling(mesh.tp)
    found["searches"] = searches(lambda graph: cut(graph, mesh.tp), "INPUTS", "ACTIVATIONS")
    distributed.stop()
    return found


def other_forms(network: Any, box: Any, exact: Exact, points: list[Tensor]) -> dict[str, Any]:
    """With all rows on every rank, as domains of a search have them, and as planes below the output."""
    from rigorous_problems import both_sides

    from service.bounds.methods import BoundOptions
    from service.bounds.rigorous import rigorous_crown

    analysis, output = rigorous_crown(network, box, BoundOptions()), network.graph.output
    rows = both_sides(output.size).reshape(1, -1, *output.shape)
    undivided = replace(analysis.backward, divided=False).lower_bounds(output.name, rows)[0]
    slopes, constants = analysis.planes(rows)
    divided = analysis.lower_bounds(rows)[0]
    passed = outside(torch.stack([undivided[: output.size], -undivided[output.size :]]), exact, points)
    return {
        "outside": passed + above_values(slopes[0], constants[0], exact, points),
        "looser": float((divided - undivided).abs().max() / divided.abs().max()),
        "width": 1.0,
        "bounds": [undivided.tolist(), slopes.tolist(), constants.tolist()],
    }


class Apart(nn.Module):
    """``relu(x_0 + x_1 − large)``, of which each rank has one term."""

    def __init__(self, axis: Any, large: float) -> None:
        super().__init__()
        self.axis, self.large = axis, large

    def forward(self, x: Tensor) -> Tensor:
        from service.parallel.collectives import copy_to_group, reduce_from_group

        own = copy_to_group(x, self.axis.group)[:, self.axis.rank : self.axis.rank + 1]
        return torch.relu(reduce_from_group(own, self.axis.group) - self.large)


class Thrice(nn.Module):
    """``(x, x, x)``: one from each rank, and one that is replicated."""

    def __init__(self, axis: Any) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        from service.parallel.collectives import copy_to_group, gather_from_group

        own = copy_to_group(x, self.axis.group)
        return torch.cat([gather_from_group(own, 1, self.axis.group, self.axis.size), x], dim=1)


def cancelling(axis: Any) -> dict[str, dict[str, float]]:
    """Upper bounds of a value that is exactly 1, of which a rounded sum over the ranks leaves 0."""
    from unittest.mock import patch

    from service.bounds.interval import Interval
    from service.bounds.methods import METHODS, BoundOptions
    from service.bounds.network import prepare
    from service.bounds.operators.allowance import Roundings
    from service.bounds.operators.base import LinearOperator
    from service.bounds.operators.collectives import CopyToGroup, ReduceFromGroup

    def upper(network: Any, x: list[float], row: list[float], method: Any) -> float:
        point = torch.tensor([x], dtype=torch.float64)
        rows = -torch.tensor([[row]], dtype=torch.float64)
        return -float(method(network, Interval(point, point), BoundOptions()).lower_bounds(rows))

    found, large = {}, 2.0**53
    for module, x, row, method in (
        (Apart(axis, large), [large, 1.0], [1.0], "ibp"),
        (Thrice(axis), [1.0], [large, 1.0, -large], "crown"),
    ):
        network = prepare(module, (len(x),), axis)
        with (
            patch.object(CopyToGroup, "roundings", lambda self, node: Roundings()),
            patch.object(ReduceFromGroup, "widened", LinearOperator.widened),
        ):
            unaccounted = upper(network, x, row, METHODS[method].rigorous)
        found[type(module).__name__] = {
            "plain": upper(network, x, row, METHODS[method]),
            "not accounted for": unaccounted,
            "rigorous": upper(network, x, row, METHODS[method].rigorous),
        }
    return found


def cut(graph: Any, axis: Any) -> Any:
    from service.bounds.graph_module import ExecutableGraph
    from service.bounds.network import from_graph
    from service.bounds.shard import shard
    from service.verification.bab.model import ModelUnderVerification
    from service.verification.engine import RIGOROUS, NetworkEngine

    network = from_graph(shard(graph, axis), axis)
    module = ExecutableGraph(network.graph)
    return ModelUnderVerification(module, NetworkEngine(network, RIGOROUS), module, None, torch.float64)


@pytest.mark.slow
def test_two_ranks_find_rigorous_bounds_that_are_as_tight_as_those_of_one(torchrun: Any) -> None:
    first, second = torchrun(compare, 2)
    assert first == second, "ranks have the same bounds to the last bit"
    check_searches(first.pop("searches"))
    for name, found in first.pop("cancelling").items():
        assert found["plain"] < 0.5, f"{name}: a rounded sum over the ranks must show"
        assert found["not accounted for"] < 0.5, f"{name}: nothing but the allowance for the ranks' sum counts"
        assert 1 <= found["rigorous"] <= 100
    assert len(first) == 2 * (len(CASES) + 1) + 1
    for name, found in first.items():
        assert found["outside"] == 0, name
        assert found["looser"] <= LOOSER, name
        assert (found["width"] < 1e-11) == (", 0.0" in name), name


entries = st.floats(-1e9, 1e9).map(lambda value: value * 2.0**-20) | st.sampled_from([2.0**60, -(2.0**60), 1.0, -0.5])


@settings(max_examples=30)
@given(parts=st.lists(entries, min_size=2, max_size=8), order=st.randoms(use_true_random=False))
def test_the_ranks_parts_are_worth_what_they_come_to_in_any_order(parts: list[float], order: random.Random) -> None:
    """Parts that cancel are off by a share of their sizes, not of what is left of them."""
    bounds = [RoundedTerms([torch.tensor([[part]], dtype=torch.float64)]).lower_bound() for part in parts]

    def add_up(own: Tensor) -> Tensor:
        waiting = [torch.stack([each, each.abs()]) for each in bounds]
        assert any(torch.equal(own, each) for each in waiting)
        while len(waiting) > 1:
            order.shuffle(waiting)
            waiting.append(waiting.pop() + waiting.pop())
        return waiting[0]

    part = RoundedTerms([torch.tensor([[parts[0]]], dtype=torch.float64)])
    found = _with_parts(RoundedTerms(), part, add_up, len(parts)).lower_bound()
    total = sum(Fraction(float(each)) for each in bounds)
    assert Fraction(float(found)) <= total
    sizes = sum(abs(Fraction(float(each))) for each in bounds)
    assert total - Fraction(float(found)) <= Fraction(2.0**-45) * sizes + Fraction(1e-300)
