"""One search on a model that is divided over tensor-parallel ranks: all decide alike, and as one process does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from meshes import start_mesh
from nets import mlp
from search_problems import goal_above, split_activations, split_inputs
from torch import nn

from service.bounds.capture import capture
from service.bounds.interval import Interval
from service.bounds.methods import CROWN
from service.bounds.network import Network, from_graph, prepare
from service.bounds.shard import shard
from service.jobs.spec.model import MlpConfig
from service.models import build
from service.parallel import distributed
from service.parallel.local_copy import local_copy
from service.parallel.mesh import Axis, Mesh
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.dual_objective import DualObjective
from service.verification.bab.activations.intermediate_bounds import bound_root
from service.verification.bab.decision import SearchResult
from service.verification.bab.lp import LinearPrograms
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import ActivationSearchSettings, OptimiserSettings, SearchSettings
from service.verification.bab.specification import Specification
from service.verification.engine import NetworkEngine

pytestmark = pytest.mark.distributed

ONCE = OptimiserSettings(1, slope_step=0.1)
WEAK = SearchSettings(activations=ActivationSearchSettings(from_scratch=ONCE, warm_start=ONCE))
"""Bounds that are hardly optimised leave the most to splits."""
Pair = tuple[ModelUnderVerification, ModelUnderVerification]
"""A model that one process has whole, and the same model divided over the ranks."""


def subject(module: nn.Module, network: Network) -> ModelUnderVerification:
    return ModelUnderVerification(module, NetworkEngine(network), module, None, torch.float64)


def built(mesh: Mesh, activation: Any, *hidden: int) -> Pair:
    """Build a model for the ranks."""
    config = MlpConfig(in_features=8, hidden=hidden, out_features=1, activation=activation)
    whole, divided = (build(config, each, dtype=torch.float64, seed=4).eval() for each in (None, mesh))
    with torch.no_grad():
        for parameter in (*whole.parameters(), *divided.parameters()):
            parameter.mul_(2.5)
    divided = local_copy(divided).requires_grad_(False)
    whole.requires_grad_(False)
    return subject(whole, prepare(whole, (8,))), subject(divided, prepare(divided, (8,), mesh.tp))


def cut(axis: Axis, *widths: int) -> Pair:
    """Cut the graph of a model for the ranks."""
    net = mlp([*widths], nn.ReLU(), 5, scale=2.0).double().eval().requires_grad_(False)
    graph = capture(net, widths[:1])
    return subject(net, from_graph(graph)), subject(net, from_graph(shard(graph, axis), axis))


def program_margin(model: ModelUnderVerification, specification: Specification) -> float:
    """Return the margin of the domain in which every operator does what it does at one input, by a linear program."""
    root = bound_root(model, specification, CROWN, time.monotonic() + 600)
    domain_bounds = DomainBounds(DualObjective(model.network, root.box, root.bounds, root.specification_rows))
    graph, neuron_index = model.network.graph, domain_bounds.neuron_index
    known = {graph.input.name: Interval.point(specification.lower[None] / 2)}
    for node in graph.nodes[1:]:
        known[node.name] = model.network.interval(node, known)
    lower = {each.value: known[each.value].lower for each in domain_bounds.preactivations.each}
    signs = domain_bounds.preactivations.flattened(lower)[0].sign()
    number = torch.arange(model.network.tp_group.axis.size * len(signs))
    again = neuron_index.everywhere(neuron_index.replicated.double()).bool() & (number >= len(signs))
    sign = torch.where(again, 0, neuron_index.everywhere(signs))[None]
    nothing = torch.zeros_like(sign)
    domain = domain_bounds.roots(root.margins).with_(index=number[None], sign=sign, at=nothing, beta=nothing)
    return LinearPrograms(model, specification).solve(domain, root.bounds).margin


def compared(name: str, split: Callable[..., SearchResult], pair: Pair, above: float, radius: float) -> Iterator[Any]:
    """Search by one process and by both ranks for outputs above what is reached, below it, and without any time.

    Only the first rank searches alone, too.
    """
    both = pair if pair[1].network.tp_group.axis.rank == 0 else pair[1:]
    assert any(pair[1].network.is_own(node.name) for node in pair[1].network.nonlinear)
    for share, limit in ((above, 600.0), (-0.02, 600.0), (above, 0.0)):
        has_programs = share > 0 and limit > 0 and "smooth" not in name
        specification = goal_above(pair[0].module, pair[0].network.graph.input.size, share, radius)
        *alone, divided = (
            split(replace(each, settings=WEAK), specification, CROWN, time.monotonic() + limit, lambda _: None)
            for each in both
        )
        yield {
            "case": f"{name} {split.__name__} {share} in {limit} s",
            "alone": [each.verdict.value for each in alone],
            "divided": divided.verdict.value,
            "domains": divided.domains,
            "bound": divided.bound,
            "counterexample": divided.counterexample,
            "programs": [program_margin(each, specification) for each in both] if has_programs else [],
        }


CASES: dict[str, tuple[Callable[..., SearchResult], Callable[[Mesh], Pair], float, float]] = {
    "built": (split_activations, lambda mesh: built(mesh, "relu", 6, 6), 0.6, 0.6),
    "built, many domains": (split_activations, lambda mesh: built(mesh, "relu", 6, 6), 0.3, 0.6),
    "built, smooth": (split_activations, lambda mesh: built(mesh, "tanh", 6, 6), 0.3, 0.3),
    "cut": (split_activations, lambda mesh: cut(mesh.tp, 12, 9, 10, 1), 0.5, 0.5),
    "cut, by inputs": (split_inputs, lambda mesh: cut(mesh.tp, 3, 12, 12, 1), 0.3, 1.0),
}
"""Of a model built for the ranks, and of a graph that was cut for them: share above what is reached, and radius."""


def search(names: list[str], count: int) -> list[dict[str, Any]]:
    """Run the first ``count`` of each model's searches alone and divided."""
    mesh, found = start_mesh(tp=2), []
    for name in names:
        split, pair, above, radius = CASES[name]
        found += islice(compared(name, split, pair(mesh), above, radius), count)
    distributed.stop()
    return found


VERDICTS = ["verified", "falsified", "unknown"]


@pytest.mark.parametrize(
    ("names", "verdicts"),
    slow_but_for([(["built"], VERDICTS[:1]), (list(CASES)[1:], VERDICTS)], (["built"], VERDICTS[:1])),
)
def test_two_ranks_of_a_divided_model_decide_as_one_process_does(
    torchrun: Any, names: list[str], verdicts: list[str]
) -> None:
    first, second = torchrun(search, 2, names=names, count=len(verdicts))
    for one, other in zip(first, second, strict=True):
        assert (one.pop("alone"), other.pop("alone")) == ([one["divided"]], []), one
        programs = one.pop("programs")
        assert other.pop("programs") == programs[1:]
        assert one == other, "ranks end with the same finding after the same domains"
        assert programs[1:] == [pytest.approx(each, rel=1e-6, abs=1e-9) for each in programs[:1]], "linear programs"
    assert [each["divided"] for each in first] == verdicts * len(names)
    for each in first:
        if "600.0" in each["case"] and each["divided"] == "verified":
            assert each["domains"] > 1, f"{each['case']} was no search"
