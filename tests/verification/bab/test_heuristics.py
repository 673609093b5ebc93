"""A branching score is one file and one line: searches branch by a score of the user's own, and decide the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from nets import mlp
from search_problems import goal_above, model_from, searched, tick
from torch import Tensor, nn
from whole_searches import split_activations, split_inputs

from service.bounds.methods import CROWN
from service.bounds.network import prepare
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.activations import search as activation_search
from service.verification.bab.activations.intermediate_bounds import bound_root
from service.verification.bab.decision import SearchResult
from service.verification.bab.heuristics import (
    ACTIVATION_SCORES,
    INPUT_SCORES,
    ActivationScore,
    ActivationView,
    Heuristics,
    InputScore,
    InputView,
)
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import specifications
from service.verification.engine import NetworkEngine
from service.verification.verdict import Verdict

FEATURES = 3
shapes: list[tuple[int, ...]] = []


@dataclass(frozen=True)
class WidestPreactivation(ActivationScore):
    """Score an entry by the width of its bounds."""

    power: float = 1.0

    def scores(self, view: ActivationView) -> Tensor:
        shapes.append(tuple(view.upper.shape))
        return (view.upper - view.lower) ** self.power


@dataclass(frozen=True)
class LongestEdge(InputScore):
    """Score all inputs alike, so that the widest is split (Moore, 1966)."""

    def scores(self, view: InputView) -> Tensor:
        shapes.append(tuple(view.planes.coefficients[:, 0].shape))
        return torch.ones_like(view.planes.coefficients[:, 0])


OWN = Heuristics(activations=(WidestPreactivation(power=2.0),), inputs=LongestEdge())


def problem() -> tuple[ModelUnderVerification, Query, float]:
    """A network, a query for outputs above a threshold near the largest one sampled, and that output."""
    module = mlp([FEATURES, 8, 8, 1], nn.ReLU(), seed=3).double().eval().requires_grad_(False)
    samples = torch.rand(20000, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    most = float(module(samples).max())
    subject = ModelUnderVerification(module, NetworkEngine(prepare(module, (FEATURES,))), module, None, torch.float64)
    ends = (-1.0,) * FEATURES, (1.0,) * FEATURES
    return subject, Query(FEATURES, 1, (Disjunct(*ends, (Halfspace(((0, -1.0),), -most),)),)), most


def above(query: Query, threshold: float) -> Query:
    (case,) = query.disjuncts
    return replace(query, disjuncts=(replace(case, halfspaces=(Halfspace(((0, -1.0),), -threshold),)),))


@pytest.mark.parametrize("split", [split_activations, split_inputs])
def test_a_search_branches_by_a_score_of_the_users_own(split: Callable[..., SearchResult]) -> None:
    subject, query, most = problem()
    verdicts = {}
    for margin in (0.1, -0.05):
        (specification,) = specifications(above(query, most + margin), torch.device("cpu"))
        shapes.clear()
        found = split(replace(subject, heuristics=OWN), specification, CROWN, time.monotonic() + 600, lambda _: None)
        verdicts[margin] = found.verdict
        if margin > 0:
            assert found.domains > 1
            assert shapes, "the score was asked"
            assert {shape[1] for shape in shapes} == {16 if split is split_activations else FEATURES}
    assert verdicts == {0.1: Verdict.VERIFIED, -0.05: Verdict.FALSIFIED}


@pytest.mark.slow
def test_intermediate_bounds_branch_by_a_score_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a clock that ticks with every look at it, so that a busy machine splits as often as an idle one."""
    tick(monkeypatch)
    subject, query, most = problem()
    (specification,) = specifications(above(query, most - 0.05), torch.device("cpu"))
    root = bound_root(subject, specification, CROWN, 1e9)
    own = replace(subject, heuristics=OWN)
    search = activation_search._ActivationSearch(own, specification, 1e9, lambda _: None, root)
    search.is_optimised = True  # what comes first splits nothing
    shapes.clear()
    search._tighter_bounds(100.0)
    assert shapes, "the score was asked"
    assert {shape[1] for shape in shapes} == {16}


def test_every_score_of_the_tables_branches_alone() -> None:
    subject, query, most = problem()
    (specification,) = specifications(above(query, most + 0.1), torch.device("cpu"))
    for activation in ACTIVATION_SCORES.values():
        own = replace(subject, heuristics=Heuristics(activations=(activation,)))
        found = split_activations(own, specification, CROWN, time.monotonic() + 600, lambda _: None)
        assert (found.verdict, found.domains > 1) == (Verdict.VERIFIED, True)
    for score in INPUT_SCORES.values():
        own = replace(subject, heuristics=Heuristics(inputs=score))
        found = split_inputs(own, specification, CROWN, time.monotonic() + 600, lambda _: None)
        assert (found.verdict, found.domains > 1) == (Verdict.VERIFIED, True)


def test_searches_go_by_the_tables_unless_told_otherwise() -> None:
    assert Heuristics().activations == tuple(ACTIVATION_SCORES.values())
    assert Heuristics().inputs in INPUT_SCORES.values()


def test_every_score_names_its_source() -> None:
    """A score cites the paper that it comes from, by authors and year, or says that it comes from none."""
    for score in (*ACTIVATION_SCORES.values(), *INPUT_SCORES.values()):
        text = " ".join((type(score).__doc__ or "").split())
        cited = re.findall(r"[A-Z]\w+(?: and [A-Z]\w+| et al\.)?, (?:\"[^\"]+\", )?(?:19|20)\d\d\)", text)
        assert bool(cited) != ("The score is Trivet's own." in text), type(score).__name__


class Extremes(nn.Module):
    """The least of a value and a constant, and a choice between values by another, behind and before ReLUs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = mlp([FEATURES, 6, 4], nn.ReLU(), 3), mlp([4, 6, 1], nn.ReLU(), 4), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "least":
            h = torch.minimum(h, torch.full((), 0.1, dtype=h.dtype))
        elif self.kind == "chosen":
            h = torch.where(h - 0.1 > 0, h, -h)
        else:
            h = torch.where(h - 0.1 > 0, torch.full((), 1.0, dtype=h.dtype), torch.full((), -1.0, dtype=h.dtype))
        found: Tensor = self.last(h)
        return found


@pytest.mark.parametrize(
    "kind", ["constants", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("least", "chosen"))]
)
def test_operators_that_some_values_only_decide_in_are_scored(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that no half proves: every kind of node is asked what it loses."""
    subject = model_from(Extremes(kind), FEATURES)
    goal = goal_above(subject.module, FEATURES, 0.02, 1.0)
    tick(monkeypatch)
    finding, heard = searched(subject, goal, seconds=200.0)
    assert heard[-1].domains > 1
    x = 2 * torch.rand(4000, FEATURES, generator=torch.Generator().manual_seed(8), dtype=torch.float64) - 1
    assert finding.verdict is not Verdict.VERIFIED or bool((goal.excess(subject.module(x)) > 0).all())
