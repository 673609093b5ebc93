"""Ranks that search together divide what all their domains need, and a root that replaces domains is on one of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from nets import mlp
from search_problems import goal_above, model_from
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import CROWN
from service.verification.bab.search_group import SearchGroup, SearchStatus


def shared_bounds() -> dict[str, Any]:
    """Bounds of hidden values: optimised alone and by a group, and refined by a group from loose ones."""
    from meshes import start_mesh

    from service.parallel import distributed
    from service.verification.bab.activations import intermediate_bounds
    from service.verification.bab.activations.intermediate_bab import refine_intermediate_bounds
    from service.verification.bab.activations.intermediate_bounds import bound_root, optimise_intermediate_bounds
    from service.verification.bab.settings import SearchSettings
    from service.verification.bab.shared_work import SharedWork

    work = SharedWork(SearchGroup(start_mesh(dp_shard=2).dp))
    net = mlp([12, 10, 10, 10, 1], nn.ReLU(), 5, scale=2.0).double()
    model, settings, rows = model_from(net, 12), SearchSettings(), list[int]()
    root = bound_root(model, goal_above(net, 12, 0.1, 0.5), CROWN, 0.0)
    found, never = dict[str, Any](), time.monotonic() + 600
    optimised = intermediate_bounds.both_optimised

    def counted(backward: Any, name: str, index: Tensor, options: Any) -> Interval:
        rows.append(index.shape[1])
        return optimised(backward, name, index, options)

    intermediate_bounds.both_optimised = counted
    for name, each in (("alone", SharedWork()), ("together", work)):
        rows.clear()
        arguments = model.network, root.box, root.bounds, never, model.options
        bounds = optimise_intermediate_bounds(*arguments, settings=settings, work=each)
        found[name], found[f"rows {name}"] = torch.cat([bounds.lower, bounds.upper]).tolist(), sum(rows)
    arguments = model.network, root.box, root.bounds, time.monotonic() + 0.3, model.options
    scores = model.heuristics.activations
    bounds = refine_intermediate_bounds(*arguments, scores=scores, settings=settings.activations, work=work)
    distributed.stop()
    return {
        **found,
        "refined": torch.cat([bounds.lower, bounds.upper]).tolist(),
        "tighter": bool((bounds.width <= root.bounds.width).all() and (bounds.width < root.bounds.width).any()),
    }


@pytest.mark.distributed
def test_ranks_divide_the_bounds_that_all_domains_share(torchrun: Any) -> None:
    first, second = torchrun(shared_bounds, 2)
    assert first["together"] == second["together"]
    assert torch.allclose(torch.tensor(first["together"]), torch.tensor(first["alone"]), rtol=1e-6)
    assert first["rows together"] + second["rows together"] == first["rows alone"]
    assert abs(first["rows together"] - second["rows together"]) <= 3, "each rank has every second entry of a layer"
    assert first["refined"] == second["refined"]
    assert first["tighter"]


def restarted() -> list[list[int]]:
    """How many domains this rank had before and after a disjunct started over, each time."""
    from dataclasses import replace
    from unittest.mock import patch

    from meshes import start_mesh
    from search_problems import split_activations

    from service.parallel import distributed
    from service.verification.bab.activations.search import _ActivationSearch
    from service.verification.bab.settings import ActivationSearchSettings, SearchSettings

    group = SearchGroup(start_mesh(dp_shard=2).dp)
    net, sizes = mlp([12, 10, 10, 1], nn.ReLU(), 5, scale=2.0).double(), list[list[int]]()
    status, start_over = _ActivationSearch._status, _ActivationSearch._start_over

    def slow_once_the_second_has_domains(self: Any, width: int) -> SearchStatus:
        is_second_busy = group.axis.rank == 1 and len(self.pool) > 0
        return replace(status(self, width), is_slow=is_second_busy and not self.shared.is_optimised)

    def watched(self: Any, disjunct: int, root: Any) -> None:
        before = len(self.pool)
        start_over(self, disjunct, root)
        sizes.append([before, len(self.pool)])

    settings = SearchSettings(activations=ActivationSearchSettings(largest_batch={"cpu": 2}))
    subject = replace(model_from(net, 12), search_group=group, settings=settings)
    with patch.multiple(_ActivationSearch, _status=slow_once_the_second_has_domains, _start_over=watched):
        found = split_activations(subject, goal_above(net, 12, 0.5, 0.5), CROWN, time.monotonic() + 600, lambda _: None)
    distributed.stop()
    assert found.verdict.value == "verified"
    return sizes


@pytest.mark.distributed
def test_a_disjunct_starts_over_on_one_rank_alone(torchrun: Any) -> None:
    first, second = torchrun(restarted, 2)
    assert first
    assert any(before for before, _ in second), "the second rank had domains of the disjunct"
    assert all(after <= 1 for _, after in first)
    assert all(after == 0 for _, after in second)
