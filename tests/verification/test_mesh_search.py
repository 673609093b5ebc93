"""One search on a model that is divided over tensor-parallel ranks: all decide alike, and as one process does."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def search() -> list[dict[str, Any]]:
    """Each search alone and divided: of a model that was built for the ranks, and of a graph that was cut for them."""

    from dataclasses import replace

    import torch
    from nets import mlp
    from search_problems import goal_above
    from torch import nn

    from service.bounds.capture import capture
    from service.bounds.interval import Interval
    from service.bounds.methods import CROWN
    from service.bounds.network import from_graph, prepare
    from service.bounds.shard import shard
    from service.jobs.spec.base import ParallelSpec
    from service.jobs.spec.model import MlpConfig
    from service.models import build
    from service.parallel import distributed
    from service.parallel.mesh import build as build_mesh
    from service.parallel.tensor import local_copy
    from service.verification.bab.activations import root_bounds as rooted
    from service.verification.bab.activations import search as activations
    from service.verification.bab.activations.domain_bounds import DomainBounds
    from service.verification.bab.activations.dual_objective import DualObjective
    from service.verification.bab.inputs import search as inputs
    from service.verification.bab.lp import LinearPrograms
    from service.verification.bab.model import ModelUnderVerification
    from service.verification.bab.settings import ActivationSearchSettings, OptimiserSettings, SearchSettings
    from service.verification.engine import NetworkEngine

    distributed.start("cpu")
    mesh = build_mesh(ParallelSpec(tp=2), "cpu")
    axis = mesh.tp

    def subject(module: nn.Module, network: Any) -> ModelUnderVerification:
        return ModelUnderVerification(module, NetworkEngine(network), module, None, torch.float64)

    def built(activation: str, *hidden: int) -> list[ModelUnderVerification]:
        config = MlpConfig(in_features=8, hidden=hidden, out_features=1, activation=activation)  # type: ignore[arg-type]
        whole, divided = (build(config, each, dtype=torch.float64, seed=4).eval() for each in (None, mesh))
        with torch.no_grad():
            for parameter in (*whole.parameters(), *divided.parameters()):
                parameter.mul_(2.5)
        divided = local_copy(divided).requires_grad_(False)
        whole.requires_grad_(False)
        return [subject(whole, prepare(whole, (8,))), subject(divided, prepare(divided, (8,), axis))]

    def cut(widths: list[int]) -> list[ModelUnderVerification]:
        net = mlp(widths, nn.ReLU(), 5, scale=2.0).double().eval().requires_grad_(False)
        graph = capture(net, widths[:1])
        return [subject(net, from_graph(graph)), subject(net, from_graph(shard(graph, axis), axis))]

    def pattern(each: ModelUnderVerification, specification: Any) -> float:
        """The margin of the domain in which every operator does what it does at one input, by a linear program."""
        root = rooted.bound_root(each, specification, CROWN, time.monotonic() + 600)
        domain_bounds = DomainBounds(DualObjective(each.network, root.box, root.bounds, root.specification_rows))
        graph, neuron_index = each.network.graph, domain_bounds.neuron_index
        known = {graph.input.name: Interval.point(specification.lower[None] / 2)}
        for node in graph.nodes[1:]:
            known[node.name] = each.network.interval(node, known)
        signs = domain_bounds.preactivations.flattened(
            {
                preactivation.value: known[preactivation.value].lower
                for preactivation in domain_bounds.preactivations.each
            }
        )[0].sign()
        number = torch.arange(axis.size * len(signs) if each is not alone else len(signs))
        again = neuron_index.everywhere(neuron_index.replicated.double()).bool() & (number >= len(signs))
        sign = torch.where(again, 0, neuron_index.everywhere(signs))[None]
        nothing = torch.zeros_like(sign)
        domain = domain_bounds.roots(root.margins).with_(index=number[None], sign=sign, at=nothing, beta=nothing)
        return LinearPrograms(each, specification).solved(domain, root.bounds).margin

    cases = [
        ("built", activations, "split_activations", built("relu", 6, 6), 0.6, 0.3),
        ("built, smooth", activations, "split_activations", built("tanh", 6, 6), 0.3, 0.3),
        ("cut", activations, "split_activations", cut([12, 9, 10, 1]), 0.5, 0.5),
        ("cut", inputs, "split_inputs", cut([3, 12, 12, 1]), 1.0, 0.3),
    ]
    found = []
    for name, module, search_name, (alone, divided), radius, above in cases:
        assert any(divided.network.is_own(node.name) for node in divided.network.nonlinear)
        for share, limit in ((above, 600.0), (-0.02, 600.0), (above, 0.0)):
            specification = goal_above(alone.module, alone.network.graph.input.size, share, radius)
            findings = []
            for each in (alone, divided):
                # Bounds that are hardly optimised leave the most to splits.
                once = OptimiserSettings(1, slopes=0.1)
                weak = SearchSettings(activations=ActivationSearchSettings(from_scratch=once, onward=once))
                own, deadline = replace(each, settings=weak), time.monotonic() + limit
                findings.append(getattr(module, search_name)(own, specification, CROWN, deadline, lambda _: None))
            found.append(
                {
                    "case": f"{name} {search_name} {share} in {limit} s",
                    "alone": findings[0].verdict.value,
                    "divided": findings[1].verdict.value,
                    "domains": findings[1].domains,
                    "bound": findings[1].bound,
                    "counterexample": findings[1].counterexample,
                    "programs": [pattern(each, specification) for each in (alone, divided)]
                    if name != "built, smooth"
                    else [],
                }
            )
    distributed.stop()
    return found


def test_two_ranks_of_a_divided_model_decide_as_one_process_does(torchrun: Any) -> None:
    first, second = torchrun(search, 2)
    for one, other in zip(first, second, strict=True):
        assert one == other, "ranks end with the same finding after the same domains"
    for each in first:
        assert each["divided"] == each["alone"], each
    assert [each["divided"] for each in first] == ["verified", "falsified", "unknown"] * 4
    for each in first:
        if each["programs"]:
            assert each["programs"][1] == pytest.approx(each["programs"][0], rel=1e-6, abs=1e-9), "linear programs"
    for each in first:
        if "600.0" in each["case"] and each["divided"] == "verified":
            assert each["domains"] > 1, f"{each['case']} was no search"
