"""Rigorous bounds on tensor-parallel ranks, against rational numbers and against those of one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from service.bounds.linear.rounding_error import RoundedTerms, _with_parts
from service.bounds.methods import CROWN

pytestmark = pytest.mark.distributed

LOOSER = 1e-6
"""What the mesh may add to the widths of one process, as a share of them."""
Exact = Callable[[Any], Any]
"""A network over arrays of rational numbers."""


def rational(tensor: Tensor) -> Any:
    flat = [Fraction(entry) for entry in tensor.flatten().tolist()]
    return np.array(flat, dtype=object).reshape(tuple(tensor.shape))


def positive(x: Any) -> Any:
    return np.where(x > 0, x, Fraction(0))


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
    from nets import redraw

    from service.parallel.mesh import SINGLE
    from service.parallel.tensor.placement import own_part, sharded_dimensions

    whole, divided = Ladder(SINGLE).double(), Ladder(mesh.tp).double()
    redraw(whole, torch.Generator().manual_seed(5), scale=30)
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter, dimension in sharded_dimensions(divided):
            parameter.copy_(own_part(weights[name], dimension, mesh.tp))
    return whole, divided, whole.exactly, (4, 3)


def mlps(mesh: Any, *hidden: int) -> tuple[nn.Module, nn.Module, Exact, tuple[int, ...]]:
    from service.jobs.spec.model import MlpConfig
    from service.models import build

    config = MlpConfig(in_features=4, hidden=hidden, out_features=2)
    whole, divided = (build(config, each, dtype=torch.float64, seed=3) for each in (None, mesh))
    with torch.no_grad():
        for parameter in (*whole.parameters(), *divided.parameters()):
            parameter.mul_(30)

    def exactly(x: Any) -> Any:
        values = [rational(each) for each in whole.parameters()]
        for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
            x = positive(weight @ x + bias)
        return values[-2] @ x + values[-1]

    return whole, divided, exactly, (4,)


def bounds_of(network: Any, box: Any, method: str) -> Tensor:
    """``(2, outputs)``: lower ones, and upper ones."""
    from rigorous_problems import both_sides

    from service.bounds.methods import METHODS, Effort
    from service.bounds.optimise import Ascent

    output = network.graph.output
    rows = both_sides(output.size).reshape(1, -1, *output.shape)
    effort = Effort(elements=2**14, ascent=Ascent(iterations=4))
    lower, negated = METHODS[method].rigorous(network, box, effort).lower_bounds(rows)[0].chunk(2)
    return torch.stack([lower, -negated])


def outside(bounds: Tensor, exact: Exact, points: Iterable[Tensor]) -> int:
    """How often an exact value leaves the bounds."""
    lower, upper = (rational(each) for each in bounds)
    values = [exact(rational(point)).reshape(-1) for point in points]
    return int(sum((value < lower).sum() + (value > upper).sum() for value in values))


CASES = [(0.0, "crown"), *((0.1, method) for method in ("ibp", "crown-ibp", "crown"))]
OPTIMISED = "shards at the head"


def above_values(slopes: Tensor, constants: Tensor, exact: Exact, points: Iterable[Tensor]) -> int:
    """How often planes are not below the exact values, and their negations, that they are for."""
    found = 0
    for point in points:
        value = exact(rational(point)).reshape(-1)
        plane = rational(slopes) @ rational(point.flatten()) + rational(constants)
        found += int((plane > np.concatenate([value, -value])).sum())
    return found


def compare() -> dict[str, dict[str, Any]]:
    """Of two networks: how often exact values leave bounds, and how much looser these are than one process's."""
    from nets import box_around

    from service.bounds.network import prepare
    from service.jobs.spec.base import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    distributed.start("cpu")
    mesh = build_mesh(ParallelSpec(tp=2), "cpu")
    nets = {
        "every collective": ladders(mesh),
        "shards at the head": mlps(mesh, 12, 10, 12),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (whole, divided, exactly, shape) in nets.items():
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

    from service.bounds.methods import Effort
    from service.bounds.rigorous import rigorous_crown

    analysis, output = rigorous_crown(network, box, Effort()), network.graph.output
    rows = both_sides(output.size).reshape(1, -1, *output.shape)
    undivided = replace(analysis.walk, divided=False).lower_bounds(output.name, rows)[0]
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
    from service.bounds.methods import METHODS, Effort
    from service.bounds.network import prepare
    from service.bounds.operators.allowance import Roundings
    from service.bounds.operators.base import LinearOperator
    from service.bounds.operators.collectives import CopyToGroup, ReduceFromGroup

    def upper(network: Any, x: list[float], row: list[float], method: Any) -> float:
        point = torch.tensor([x], dtype=torch.float64)
        rows = -torch.tensor([[row]], dtype=torch.float64)
        return -float(method(network, Interval(point, point), Effort()).lower_bounds(rows))

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


def cut_into_stages(graph: Any, axis: Any, line: Any) -> Any:
    from service.bounds.graph_module import ExecutableGraph
    from service.bounds.shard import shard
    from service.bounds.stages import InStages, divide_into_stages
    from service.verification.bab.model import ModelUnderVerification
    from service.verification.engine import RIGOROUS, StagesEngine

    staged = divide_into_stages(shard(graph, axis), axis, line)
    module = InStages(ExecutableGraph(staged.network.graph), line)
    return ModelUnderVerification(module, StagesEngine.of(staged, RIGOROUS), module, None, torch.float64)


def searches(divided: Callable[[Any], Any], *splits: str) -> dict[str, list[str]]:
    """Verdicts by splits of inputs or of activations, for graphs that are ``divided``; the last are not rigorous."""
    from unittest.mock import patch

    from nets import mlp
    from rigorous_problems import above, vanishing

    from service.bounds.capture import capture
    from service.formats.vnnlib import Disjunct, Halfspace, Query
    from service.verification.bab.decision import Technique
    from service.verification.bab.driver import decide
    from service.verification.engine import PLAIN

    net = mlp([4, 9, 10, 2], nn.ReLU(), 1, scale=2.0).double().eval().requires_grad_(False)
    x = 2 * torch.rand(4000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    least, most = net(x).amin(dim=0), net(x).amax(dim=0)
    # Over the rational numbers y = 1 at x = 1, but its two terms, which ranks have, are the same when rounded.
    reached = Query(1, 1, (Disjunct((0.5,), (1.0,), (Halfspace(((0, -1.0),), -0.5),)),))
    subject, cancelling = (
        divided(capture(each, (features,))) for each, features in ((net, 4), (vanishing(27).requires_grad_(False), 1))
    )
    cases = {
        "verified": (subject, above(4, 1.0, *(most + 0.1 * (most - least)).tolist()), 60.0),
        "falsified": (subject, above(4, 1.0, *(most - 0.05 * (most - least)).tolist()), 60.0),
        "open": (cancelling, reached, 0.5),
        "wrong": (replace(cancelling, engine=replace(cancelling.engine, arithmetic=PLAIN)), reached, 60.0),
    }
    found: dict[str, list[str]] = {}
    for means in (Technique[each] for each in splits):
        with patch("service.verification.bab.driver.technique_for", lambda *_, means=means: means):
            for name, (each, query, limit) in cases.items():
                decision = decide(each, query, CROWN, limit, restarts=0)
                assert decision.technique is means
                found.setdefault(name, []).append(decision.verdict.value)
    return found


def check_searches(found: dict[str, list[str]]) -> None:
    assert set(found["verified"]) == {"verified"}
    assert set(found["falsified"]) == {"falsified"}
    assert set(found["wrong"]) == {"verified"}, "a plain search must be wrong there"
    assert "verified" not in found["open"]


MESHES = [({"pp": 2, "tp": 2}, (8, 6, 8, 6, 8)), ({"pp": 4}, (8, 6, 8, 6))]
"""With the widths of an MLP's hidden layers: the first has shards between its stages."""


def in_stages() -> dict[str, dict[str, Any]]:
    """The same of pipeline stages, with shards between them and with whole values."""
    from nets import box_around
    from rigorous_problems import both_sides

    from service.bounds.methods import METHODS, Effort
    from service.bounds.network import prepare
    from service.bounds.optimise import Ascent
    from service.bounds.stages import StageLink, prepare_stages
    from service.jobs.spec.base import ParallelSpec
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh

    device = distributed.start("cpu")
    found: dict[str, dict[str, Any]] = {}
    for degrees, hidden in MESHES:
        mesh = build_mesh(ParallelSpec.model_validate(degrees), "cpu")
        line = StageLink(mesh, device)
        whole, divided, exactly, shape = mlps(mesh, *hidden)
        staged, alone = prepare_stages(divided, shape, mesh.tp, line), prepare(whole, shape)
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        rows = both_sides(2)
        for method in ("ibp", "crown", "alpha-crown"):
            box, effort = box_around(x, 0.1), Effort(elements=2**14, ascent=Ascent(iterations=4))
            analysis = staged.method(METHODS[method].rigorous)(staged.network, box, effort)
            lower, negated = analysis.lower_bounds(rows)[0].chunk(2)
            ours, expected = torch.stack([lower, -negated]), bounds_of(alone, box, method)
            corners = (torch.rand(4, *shape, generator=torch.Generator().manual_seed(2)) < 0.5).unbind()
            points = [torch.where(corner, box.upper[0], box.lower[0]) for corner in corners]
            slopes, constants = analysis.planes(rows)
            widths = [float((upper - lower).mean()) for lower, upper in (ours, expected)]
            found[f"{hidden} on {degrees}, {method}"] = {
                "outside": outside(ours, exactly, points) + above_values(slopes[0], constants[0], exactly, points),
                "looser": widths[0] / widths[1] - 1,
                "bounds": ours.tolist(),
                "planes": [slopes.tolist(), constants.tolist()],
            }
        if mesh.tp.size > 1:  # of four stages some have no activations, and nothing to be split
            divide = partial(cut_into_stages, axis=mesh.tp, line=line)
            found["searches"] = searches(divide, "ACTIVATIONS")
    distributed.stop()
    return found


def test_stages_find_rigorous_bounds_that_are_as_tight_as_those_of_one_process(torchrun: Any) -> None:
    first, *others = torchrun(in_stages, 4)
    assert all(each == first for each in others), "ranks have the same bounds to the last bit"
    check_searches(first.pop("searches"))
    for name, found in first.items():
        assert found["outside"] == 0, name
        assert found["looser"] <= LOOSER, name


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
