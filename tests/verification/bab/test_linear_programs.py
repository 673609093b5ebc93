"""Linear programs of domains: what they leave to later rounds, leave open and do not prove."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from nets import mlp
from search_problems import exact_minimum, model_from, searched, specification_of
from torch import nn

from service.bounds.interval import Interval
from service.bounds.methods import CROWN
from service.bounds.network import prepare
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.activations import search as activations
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DisjunctRows, DualObjective
from service.verification.bab.driver import decide
from service.verification.bab.lp import LinearPrograms, _AffineMap, _solve
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import ActivationSearchSettings, SearchSettings
from service.verification.bab.time_plan import TimePlan
from service.verification.engine import NetworkEngine
from service.verification.verdict import Verdict


@pytest.mark.slow
def test_programs_that_take_long_leave_the_others_to_later_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Domains that wait for one are not lost, and every round solves at least one."""
    net = mlp([3, 6, 5, 2], nn.ReLU(), 1).double().requires_grad_(False)
    lower, upper = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    row = torch.tensor([1.0, -1.0], dtype=torch.float64)
    least, waited = exact_minimum(net, lower, upper, row), []
    by_programs = activations._ActivationSearch._solve_programs

    def counted(self: Any, domains: Domains) -> Any:
        waited.append(len(domains))
        return by_programs(self, domains)

    usual = ActivationSearchSettings()
    hasty = replace(usual, warm_start=replace(usual.warm_start, iterations=1))
    monkeypatch.setattr(activations._ActivationSearch, "_optimise_from_scratch", lambda self, domains: domains)
    monkeypatch.setattr(activations._ActivationSearch, "_solve_programs", counted)
    subject = replace(
        model_from(net, 3), settings=SearchSettings(time=TimePlan(program_seconds=-1.0), activations=hasty)
    )
    for offset, verdict in ((-1e-5, Verdict.VERIFIED), (1e-5, Verdict.FALSIFIED)):
        finding, _ = searched(subject, specification_of(lower, upper, row[None], [least + offset], [0]))
        assert finding.verdict is verdict
    assert max(waited) > 1


def test_programs_of_numbers_that_overflowed_prove_nothing() -> None:
    none = _AffineMap(np.zeros((0, 1)), np.zeros(0))
    assert _solve(_AffineMap(np.full((1, 1), np.inf), np.zeros(1)), none) == (-inf, None)


@pytest.mark.parametrize(("dtype", "verdict"), [(torch.float32, Verdict.UNKNOWN), (torch.float64, Verdict.VERIFIED)])
def test_a_program_leaves_open_what_rounding_in_the_models_own_type_may_violate(
    dtype: torch.dtype, verdict: Verdict
) -> None:
    module = mlp([3, 8, 2], nn.ReLU(), 0).requires_grad_(False)
    exact, middle = deepcopy(module).double(), (0.25,) * 3
    below = float(exact(torch.tensor([middle], dtype=torch.float64))[0, 0]) - 1e-9
    engine = NetworkEngine(prepare(module.to(dtype), (3,)))
    query = Query(3, 2, (Disjunct(middle, middle, (Halfspace(((0, 1.0),), below),)),))
    assert decide(ModelUnderVerification(module, engine, exact, None, dtype), query, CROWN, 60.0).verdict is verdict


def test_no_program_for_operators_that_still_bend() -> None:
    """Entries without finite bounds are never split, and their sign stays open."""
    module = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)).double().requires_grad_(False)
    module[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    module[0].bias.zero_()
    module[2].weight.copy_(torch.tensor([[-1.0, -1.0]]))
    module[2].bias.fill_(0.5)
    subject = ModelUnderVerification(module, NetworkEngine(prepare(module, (1,))), module, None, torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    goal = specification_of(-one, one, one[None], [0.0], [0])
    nothing = torch.full((1, 2), torch.inf, dtype=torch.float64)
    specification_rows = DisjunctRows(subject.network.graph.output.name, one[None, None], 0 * one[None], one[None] > 0)
    domain_bounds = DomainBounds(
        DualObjective(subject.network, goal.box(torch.float64), Interval(-nothing, nothing), specification_rows)
    )
    domain = domain_bounds.roots(-one[None])
    assert LinearPrograms(subject, goal).solve(domain, domain_bounds.bounds).margin == -torch.inf
