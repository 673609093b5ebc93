"""Splitting inputs: complete on small networks, sound on all, and honest about what is left."""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from search_problems import model_from, split_inputs
from torch import Tensor, nn

from service.bounds.affine_forward import affine_forward
from service.bounds.folded import fold
from service.bounds.interval import Interval
from service.bounds.methods import CROWN, BoundOptions
from service.bounds.planes import BoxPlanes, Planes, minimum
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.decision import Decision, SearchProgress, SearchResult, Technique
from service.verification.bab.driver import DecisionProgress, decide
from service.verification.bab.inputs.boxes import LinearCut, clip_boxes
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import InputSearchSettings, SearchSettings
from service.verification.bab.specification import specifications
from service.verification.verdict import Verdict

CPU = torch.device("cpu")
deciding = importlib.import_module("service.verification.bab.driver")


def dense(seed: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


class Mixed(nn.Module):
    """Smooth and bilinear operators between the layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * torch.sin(self.first(x))
        out: Tensor = self.second(hidden) + x * x
        return out


def query(lower: list[float], upper: list[float], *cases: list[tuple[list[float], float]]) -> Query:
    """One case for each list of rows and thresholds, all in one box."""
    made = [
        Disjunct(
            tuple(lower),
            tuple(upper),
            tuple(Halfspace(tuple((i, c) for i, c in enumerate(row) if c), threshold) for row, threshold in rows),
        )
        for rows in cases
    ]
    return Query(len(lower), len(cases[0][0][0]), tuple(made))


def vertices(module: nn.Sequential) -> Tensor:
    """Every point of the square [−1, 1]² where a piecewise linear network with one hidden layer may be extremal."""
    first = module[0]
    assert isinstance(first, nn.Linear)
    edges = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    normals = torch.cat([first.weight, edges])
    offsets = torch.cat([first.bias, torch.full((4,), -1.0, dtype=torch.float64)])
    points = []
    for i in range(len(normals)):
        for j in range(i):
            pair = torch.stack([normals[i], normals[j]])
            if abs(float(torch.linalg.det(pair))) > 1e-9:
                points.append(torch.linalg.solve(pair, -torch.stack([offsets[i], offsets[j]])))
    every = torch.stack(points)
    within: Tensor = every[(every.abs() <= 1 + 1e-12).all(dim=1)]
    return within.clamp(-1, 1)


def search(under: ModelUnderVerification, asked: Query, seconds: float = 300.0) -> SearchResult:
    """The search alone, without the attack before it."""
    (specification,) = specifications(asked, CPU)
    return split_inputs(under, specification, CROWN, time.monotonic() + seconds, lambda _: None)


def violates(under: ModelUnderVerification, asked: Query, decision: Decision | SearchResult) -> bool:
    assert decision.counterexample is not None
    x = torch.tensor([decision.counterexample], dtype=torch.float64)
    y = under.float64_module(x)[0]
    return any(
        all(low <= value <= high for low, value, high in zip(case.lower, x[0].tolist(), case.upper, strict=True))
        and all(sum(c * float(y[i]) for i, c in each.coefficients) <= each.threshold for each in case.halfspaces)
        for case in asked.disjuncts
    )


@pytest.mark.parametrize("above", [1e-6, -1e-6])
@pytest.mark.parametrize("seed", slow_but_for(range(3), 0))
def test_small_networks_are_decided_next_to_their_exact_minimum(seed: int, above: float) -> None:
    module = dense(seed, 2, 7, 1)
    least = float(module(vertices(module)).min())
    asked = query([-1.0, -1.0], [1.0, 1.0], [([1.0], least + above)])
    found = search(model_from(module, 2), asked)
    assert found.verdict is (Verdict.FALSIFIED if above > 0 else Verdict.VERIFIED)
    assert above < 0 or violates(model_from(module, 2), asked, found)


class Cancelling(nn.Module):
    """``x·y``, as a product whose linear terms other terms cancel."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (x[:, :1] + 1) * (x[:, 1:] + 1) - x[:, :1] - x[:, 1:] - 1
        return found


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_terms_that_cancel_the_slopes_of_a_product_cost_a_plane_nothing(sign: float) -> None:
    box = Interval(torch.full((1, 2), -0.1).double(), torch.full((1, 2), 0.1).double())
    folded = fold(model_from(Cancelling(), 2).network, box.lower)
    assert folded is not None
    planes = BoxPlanes(folded, box, {}).planes(torch.tensor([[sign]], dtype=torch.float64))
    assert float(minimum(box, planes.coefficients, planes.bias)) == pytest.approx(-0.01)


def test_a_disjunct_that_is_proved_everywhere_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    module, bounded, planes = dense(0, 2, 7, 1), list[int](), BoxPlanes.planes
    least = float(module(vertices(module)).min())

    def counted(self: BoxPlanes, rows: Tensor) -> Planes:
        bounded.append(len(rows))
        return planes(self, rows)

    monkeypatch.setattr(BoxPlanes, "planes", counted)
    asked = query([-1.0, -1.0], [1.0, 1.0], [([-1.0], -1e3)], [([1.0], least - 1e-6)])
    assert search(model_from(module, 2), asked).verdict is Verdict.VERIFIED
    assert bounded[0] == 2
    assert set(bounded[1:]) == {1}


@settings(max_examples=examples(2, 8), deadline=None)
@given(seed=st.integers(0, 10**6), threshold=st.floats(-1.0, 0.5), joint=st.booleans(), smooth=st.booleans())
def test_verdicts_agree_with_a_grid(seed: int, threshold: float, joint: bool, smooth: bool) -> None:
    module = Mixed(seed).double() if smooth else dense(seed, 2, 6, 6, 2)
    rows = [([1.0, 0.0], threshold), ([0.0, -1.0], threshold)]
    asked = query([-1.0, -0.5], [1.0, 1.0], *([rows] if joint else [[row] for row in rows]))
    under = model_from(module, 2)
    found = search(under, asked)
    x = torch.cartesian_prod(torch.linspace(-1, 1, 60), torch.linspace(-0.5, 1, 60)).double()
    first, second = under.float64_module(x)[:, 0] <= threshold, -under.float64_module(x)[:, 1] <= threshold
    reached = bool(((first & second) if joint else (first | second)).any())
    assert found.verdict is not Verdict.UNKNOWN
    assert not (reached and found.verdict is Verdict.VERIFIED)
    assert found.verdict is Verdict.VERIFIED or violates(under, asked, found)


@settings(max_examples=examples(2, 12), deadline=None)
@given(seed=st.integers(0, 10**6), shares=st.lists(st.sampled_from([0.01, 0.1, 0.4]), min_size=1, max_size=3))
def test_a_bound_is_below_the_margin_of_every_input(seed: int, shares: list[float]) -> None:
    """That of disjuncts that were settled first, and of parts that were cut off, too."""
    module = dense(seed, 2, 6, 6, 2)
    x = torch.cartesian_prod(torch.linspace(-1, 1, 60), torch.linspace(-0.5, 1, 60)).double()
    rows = torch.randn(len(shares), 2, dtype=torch.float64)
    values = module(x).detach() @ rows.T
    thresholds = values.amin(dim=0) - torch.tensor(shares) * (values.amax(dim=0) - values.amin(dim=0))
    cases = [[(row.tolist(), float(each))] for row, each in zip(rows, thresholds, strict=True)]
    moments: list[SearchProgress] = []
    (specification,) = specifications(query([-1.0, -0.5], [1.0, 1.0], *cases), CPU)
    found = split_inputs(model_from(module, 2), specification, CROWN, time.monotonic() + 600, moments.append)
    assert max(found.bound, *(each.bound for each in moments)) <= float((values - thresholds).min()) + 1e-9


@pytest.fixture
def left_by_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if intervals proved nothing, so that a search has to."""
    monkeypatch.setattr(deciding._Decider, "is_proved_by_intervals", lambda _: False)


@pytest.mark.usefixtures("left_by_intervals")
def test_of_goals_whose_turn_has_not_come_no_bound_is_known() -> None:
    under = model_from(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()), 1)
    with torch.no_grad():
        under.module.get_parameter("0.weight").fill_(1.0)
    cases = [Disjunct((low,), (low + 1.0,), (Halfspace(((0, -1.0),), -1.5),)) for low in (1.0, 0.0, 2.0)]
    falsified = decide(under, Query(1, 1, tuple(cases)), CROWN, 20.0, restarts=0)
    assert (falsified.verdict, falsified.bound) == (Verdict.FALSIFIED, -math.inf)
    told: list[DecisionProgress] = []
    verified = decide(
        under, Query(1, 1, (cases[1], Disjunct((-1.0,), (0.0,), cases[1].halfspaces))), CROWN, 20.0, told.append
    )
    assert verified.verdict is Verdict.VERIFIED
    assert told[0].bound == -math.inf
    assert 0 <= verified.bound == told[-1].bound <= 0.5


@settings(max_examples=examples(2, 8), deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 2.0))
def test_planes_lie_below_the_rows(seed: int, scale: float) -> None:
    module = Mixed(seed).double() if seed % 2 else dense(seed, 2, 6, 6, 2)
    network = model_from(module, 2).network
    lower = torch.randn(5, 2, dtype=torch.float64)
    box = Interval(lower, lower + scale * torch.rand(5, 2, dtype=torch.float64))
    rows = torch.randn(3, 2, dtype=torch.float64)
    folded = fold(network, lower)
    assert folded is not None
    with torch.no_grad():
        planes = BoxPlanes(folded, box, {}).planes(rows)
        inner = Interval(box.lower, box.lower + box.width / 2)
        again = BoxPlanes(folded, inner, planes.known).planes(rows)
        for each, part in ((planes, box), (again, inner)):
            x = part.lower + torch.rand(40, 5, 2, dtype=torch.float64) * part.width
            below = torch.einsum("brf,nbf->nbr", each.coefficients, x) + each.bias
            values = module(x.flatten(0, 1)).reshape(40, 5, 2) @ rows.T
            assert bool((below <= values + 1e-9).all())


@settings(max_examples=examples(2, 8), deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 2.0))
def test_affine_forms_hold_every_value(seed: int, scale: float) -> None:
    module = Mixed(seed).double() if seed % 2 else dense(seed, 2, 6, 6, 2)
    network = model_from(module, 2).network
    lower = torch.randn(4, 2, dtype=torch.float64)
    width = scale * torch.rand(4, 2, dtype=torch.float64)
    width[:, seed % 2] *= seed % 3  # sometimes without any width
    box = Interval(lower, lower + width)
    with torch.no_grad():
        backward = affine_forward(network, box, BoundOptions())
        identity = torch.eye(2, dtype=torch.float64)
        below = backward.lower_bounds(network.graph.output.name, torch.cat([identity, -identity])[None])
        x = lower + torch.rand(40, 4, 2, dtype=torch.float64) * width
        values = module(x.flatten(0, 1)).reshape(40, 4, 2)
    assert bool((torch.cat([values, -values], dim=2) >= below - 1e-9).all())
    assert bool((backward.intervals[network.graph.output.name].lower <= values + 1e-9).all())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), disjuncts=st.integers(1, 3))
def test_clipping_loses_no_counterexample(seed: int, disjuncts: int) -> None:
    torch.manual_seed(seed)
    rows = [([1.0, 0.0, 0.0], 0.0), ([0.0, 1.0, 0.0], 0.0), ([0.0, 0.0, 1.0], 0.0)]
    cases = [[row] for row in rows[: disjuncts - 1]] + [rows[disjuncts - 1 :]]
    (specification,) = specifications(query([-1.0, -1.0], [1.0, 1.0], *cases), CPU)
    box = specification.box(torch.float64)
    coefficients, bias = torch.randn(1, 3, 2, dtype=torch.float64), 0.5 * torch.randn(1, 3, dtype=torch.float64)
    cut = LinearCut.of(specification, box, coefficients, bias)
    left = torch.ones(1, specification.disjunct_count, dtype=torch.bool)
    smaller, margins, left = clip_boxes(specification, cut, box, left, 3)
    x = 2 * torch.rand(500, 2, dtype=torch.float64) - 1
    each = specification.per_disjunct((x[:, None] * coefficients).sum(dim=2) + bias)
    for point, values in zip(x, each, strict=True):
        for disjunct in (values <= 0).nonzero().flatten().tolist():
            assert bool(left[0, disjunct])
            assert bool((point >= smaller.lower[0]).all() and (point <= smaller.upper[0]).all())
    assert bool((each.amin(dim=0) >= margins[0] - 1e-9).all())
    assert bool((minimum(box, coefficients, bias) <= (x @ coefficients[0].T + bias).amin(dim=0) + 1e-9).all())


def test_inputs_without_width_stay_where_they_are() -> None:
    module = dense(5, 3, 6, 1)
    under = model_from(module, 3)
    line = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    values = module(torch.stack([torch.full_like(line, 0.3), line, torch.full_like(line, -0.2)], dim=1))
    for share, verdict in ((1e-3, Verdict.FALSIFIED), (-1e-3, Verdict.VERIFIED)):
        asked = query([0.3, -1.0, -0.2], [0.3, 1.0, -0.2], [([1.0], float(values.min()) + share)])
        found = search(under, asked)
        assert found.verdict is verdict
        if found.counterexample is not None:
            assert (found.counterexample[0], found.counterexample[2]) == (0.3, -0.2)


def test_every_box_of_a_query_counts() -> None:
    under = model_from(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()), 1)
    with torch.no_grad():
        under.module.get_parameter("0.weight").fill_(1.0)
    apart = [Disjunct((low,), (low + 1.0,), (Halfspace(((0, -1.0),), -1.5),)) for low in (-2.0, -1.0, 0.0)]
    assert decide(under, Query(1, 1, tuple(apart)), CROWN, 20.0).verdict is Verdict.VERIFIED
    further = (*apart, Disjunct((1.0,), (1.6,), (Halfspace(((0, -1.0),), -1.5),)))
    decision = decide(under, Query(1, 1, further), CROWN, 20.0)
    assert decision.verdict is Verdict.FALSIFIED
    assert decision.counterexample is not None
    assert 1.5 <= decision.counterexample[0] <= 1.6


def test_a_search_without_time_tells_what_it_knows() -> None:
    module = dense(3, 2, 12, 1)
    under = model_from(module, 2)
    asked = query([-1.0, -1.0], [1.0, 1.0], [([1.0], float(module(vertices(module)).min()) - 1e-6)])
    moments: list[SearchProgress] = []
    (specification,) = specifications(asked, CPU)
    found = split_inputs(under, specification, CROWN, time.monotonic() + 600, moments.append)
    bounds = [moment.bound for moment in moments]
    assert found.verdict is Verdict.VERIFIED
    assert bounds == sorted(bounds)
    assert bounds[0] == -math.inf
    assert any(-math.inf < bound < 0 for bound in bounds)
    told: list[DecisionProgress] = []
    none = decide(under, asked, CROWN, 0.0, told.append)
    assert none.verdict is Verdict.UNKNOWN
    assert none.technique is Technique.INPUTS
    assert told


def test_what_an_attack_finds_is_not_searched_for() -> None:
    module = dense(3, 2, 12, 1)
    easy = float(module(vertices(module)).max()) + 1.0
    found = decide(model_from(module, 2), query([-1.0, -1.0], [1.0, 1.0], [([1.0], easy)]), CROWN, 600.0)
    assert (found.verdict, found.technique) == (Verdict.FALSIFIED, Technique.ATTACK)


def test_a_tie_is_no_verdict() -> None:
    """The output reaches the threshold in no number of this type, and is arbitrarily near."""

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x - 0.6 * x

    coarse = SearchSettings(inputs=InputSearchSettings(smallest_width=1e-3))
    under = replace(model_from(Shifted(), 1), settings=coarse)
    found = search(under, query([-1.0], [1.0], [([1.0], -0.09 - 1e-13)]))
    assert found.verdict is Verdict.UNKNOWN
    assert found.bound <= 0


@pytest.mark.usefixtures("left_by_intervals")
@pytest.mark.parametrize("suffices", [True, False])
def test_a_box_of_several_inputs_is_looked_at_as_a_whole_before_it_is_halved(
    suffices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where splits of activations decide, that is the answer; else the search goes on from what they have shown."""
    features = SearchSettings().several_inputs + 1
    lower, upper, under = [-0.1] * features, [0.1] * features, model_from(dense(0, features, 8, 1), features)
    far = decide(under, query(lower, upper, [([1.0], -1e3)]), CROWN, 5.0, restarts=0)
    if not suffices:

        class Undecided:
            def __init__(self, *_: object) -> None:
                pass

            def run(self, deadline: float) -> SearchResult:
                return SearchResult(Verdict.UNKNOWN, None, 3, 0.01)

        monkeypatch.setitem(deciding.SEARCHES, Technique.ACTIVATIONS, Undecided)
    heard: list[DecisionProgress] = []
    asked = query(lower, upper, [([1.0], far.bound - 1e3 - 0.05)])
    found = decide(under, asked, CROWN, 5.0, heard.append, restarts=0)
    assert found.verdict is Verdict.VERIFIED
    assert found.technique is (Technique.ACTIVATIONS if suffices else Technique.INPUTS)
    assert min(each.bound for each in heard) >= (-math.inf if suffices else 0.01)
    assert found.bound >= 0.01
    assert suffices or found.domains > 3
