"""Bounds of hidden values where a property fails: they hold there, are tighter there, and decide what they should."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from nets import mlp
from search_problems import (
    NETS,
    bounding_of,
    evaluated,
    exact_minimum,
    model_from,
    model_named,
    random_domains,
    searched,
    specification_of,
    tick,
)
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.split import Preactivations
from service.verification.bab.activations import domains as domains_of_searches
from service.verification.bab.activations import search as activations
from service.verification.bab.activations import shared_bounds
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import DomainPool, Domains
from service.verification.bab.activations.dual_objective import DisjunctRows, DualObjective
from service.verification.bab.activations.refinement_times import RefinementTimes
from service.verification.bab.activations.shared_bounds import SharedBounds
from service.verification.bab.invprop import Invprop
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import SearchStatus
from service.verification.bab.settings import InvpropSettings, PoolSettings, SearchSettings
from service.verification.bab.time_plan import TimePlan
from service.verification.verdict import Verdict

ROWS = torch.tensor([[1.0, -1.0], [-0.3, 1.0]], dtype=torch.float64)

AT_ONCE = SearchSettings(time=TimePlan(quick_share=0.0))
"""A search tightens what its domains share before it splits any."""


def objective_of(
    subject: ModelUnderVerification, box: Interval, rows: Tensor, thresholds: Tensor
) -> tuple[DualObjective, DisjunctRows]:
    """Disjuncts of equally many rows: ``rows`` ``(disjuncts, rows, outputs)``, ``thresholds`` ``(disjuncts, rows)``."""
    analysis = METHODS["crown"](subject.network, box, BoundOptions())
    used = torch.ones_like(thresholds, dtype=torch.bool)
    specification_rows = DisjunctRows(subject.network.graph.output.name, rows, thresholds, used)
    return DualObjective(
        subject.network, box, Preactivations.of(subject.network).bounds(analysis.inputs), specification_rows
    ), specification_rows


def margin_of(objective: DualObjective, disjunct: int) -> float:
    """By CROWN's relaxations on what is known."""
    domain_bounds = DomainBounds(objective)
    roots = domain_bounds.roots(
        torch.zeros_like(domain_bounds.specification_rows.of(torch.arange(len(objective.bounds.lower)))[1])
    )
    return float(domain_bounds.margins(roots)[min(disjunct, len(roots) - 1)])


def hidden_values(subject: ModelUnderVerification, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of all sites ``(n, entries)``, and the outputs."""
    values = evaluated(subject.network, x)
    preactivations = Preactivations.of(subject.network)
    hidden = preactivations.flattened(
        {preactivation.value: values[preactivation.value] for preactivation in preactivations.each}
    )
    return hidden, values[subject.network.graph.output.name]


@pytest.mark.parametrize("name", slow_but_for(sorted(NETS), "gate"))
@settings(max_examples=examples(2, 3), deadline=None)
@given(seed=st.integers(0, 3), share=st.floats(0.01, 0.5), radius=st.floats(0.1, 1.0), both=st.booleans())
def test_bounds_hold_wherever_the_property_fails(name: str, seed: int, share: float, radius: float, both: bool) -> None:
    """Of each disjunct for itself, whatever is taken for the margin that the whole box lacks."""
    subject, generator = model_named(name, seed), torch.Generator().manual_seed(seed)
    centre = 0.3 * torch.randn(1, 3, generator=generator, dtype=torch.float64)
    x = centre + radius * (2 * torch.rand(1000, 3, generator=generator, dtype=torch.float64) - 1)
    hidden, outputs = hidden_values(subject, x)
    rows = ROWS[None] if both else ROWS[:, None]
    excess = torch.einsum("drk,nk->ndr", rows, outputs)
    thresholds = excess.quantile(share, dim=0)
    objective, specification_rows = objective_of(subject, Interval(centre - radius, centre + radius), rows, thresholds)
    known = objective.bounds
    found = Invprop(objective, specification_rows, InvpropSettings())
    for disjunct in range(len(rows)):
        for margin in (-0.5, -0.01):
            left = found.tighten(disjunct, margin, found.preactivations, time.monotonic() + 600)
            fails = (excess[:, disjunct] <= thresholds[disjunct]).all(dim=1)
            assert left is not None or not bool(fails.any())
            bounds = objective.known(torch.tensor([disjunct]))
            assert bool((hidden[fails] >= bounds.lower - 1e-9).all())
            assert bool((hidden[fails] <= bounds.upper + 1e-9).all())
            assert bool((bounds.width <= known.width + 1e-12).all())


def test_bounds_hold_of_a_difference_that_only_decides_on_a_maximum() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Hardtanh(0.2, 0.6)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.zero_()
    subject, one = model_from(net, 1), torch.ones(1, 1, dtype=torch.float64)
    objective, specification_rows = objective_of(subject, Interval(-one, one), one[None], one)
    invprop = Invprop(objective, specification_rows, InvpropSettings())
    assert invprop.tighten(0, -0.5, invprop.preactivations, time.monotonic() + 600) is not None
    hidden, _ = hidden_values(subject, torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None])
    assert bool(((hidden >= objective.bounds.lower - 1e-9) & (hidden <= objective.bounds.upper + 1e-9)).all())


def test_bounds_are_tighter_than_those_that_always_hold() -> None:
    """By far, and of one disjunct without a change of the other's."""
    subject, centre = model_named("relu", 1), torch.zeros(1, 3, dtype=torch.float64)
    x = 2 * torch.rand(20000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    _, outputs = hidden_values(subject, x)
    thresholds = (outputs @ ROWS.T).amin(dim=0)[:, None] + 0.05
    objective, specification_rows = objective_of(subject, Interval(centre - 1, centre + 1), ROWS[:, None], thresholds)
    before, found = objective.bounds, Invprop(objective, specification_rows, InvpropSettings())
    for _ in range(3):
        found.tighten(0, -0.3, found.preactivations, time.monotonic() + 600)
    last = Preactivations.of(subject.network).each[-1]
    place = slice(last.offset, last.offset + last.size)
    assert float(objective.bounds.width[0, place].sum()) < 0.7 * float(before.width[0, place].sum())
    assert torch.equal(objective.bounds.lower[1], before.lower[0])
    assert torch.equal(objective.bounds.upper[1], before.upper[0])


@pytest.mark.parametrize("share", [0.8, -0.02])
def test_a_property_that_holds_is_proved_without_splits_and_no_other(share: float) -> None:
    """``share`` of what CROWN loses is between the exact minimum and the threshold."""
    net = mlp([3, 7, 6, 2], nn.ReLU(), 0).double().requires_grad_(False)
    subject, one = model_from(net, 3), torch.ones(3, dtype=torch.float64)
    least = exact_minimum(net, -one, one, ROWS[0])
    box = Interval(-one[None], one[None])
    lost = least - margin_of(objective_of(subject, box, ROWS[None, :1], torch.zeros(1, 1, dtype=torch.float64))[0], 0)
    thresholds = torch.tensor([[least - share * lost]], dtype=torch.float64)
    objective, specification_rows = objective_of(subject, box, ROWS[None, :1], thresholds)
    found = Invprop(objective, specification_rows, InvpropSettings())
    margin, proved = margin_of(objective, 0), False
    assert margin < 0
    for _ in range(10):
        left = found.tighten(0, margin, found.preactivations, time.monotonic() + 600)
        if left is None or (margin := margin_of(objective, 0)) > 0:
            proved = True
            break
    assert proved == (share > 0)


def test_what_time_does_not_suffice_for_stays_as_it_is() -> None:
    subject, centre = model_named("relu", 0), torch.zeros(1, 3, dtype=torch.float64)
    thresholds = torch.zeros(1, 2, dtype=torch.float64)
    objective, specification_rows = objective_of(subject, Interval(centre - 1, centre + 1), ROWS[None], thresholds)
    before, found = objective.bounds, Invprop(objective, specification_rows, InvpropSettings())
    assert found.tighten(0, -1.0, found.preactivations, time.monotonic() - 1) == []
    assert objective.bounds is before


@pytest.mark.slow
def test_a_search_that_supposes_failure_at_once_decides_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two disjuncts, and verdicts of a mixed-integer program; a proof says no more than that it is one."""
    # Long enough to tighten bounds on a busy machine.
    at_once = SearchSettings(time=TimePlan(quick_share=0.0, quick_seconds=30.0))
    supposed, tighten = [], Invprop.tighten
    monkeypatch.setattr(Invprop, "tighten", lambda *args: (supposed.append(args[1]), tighten(*args))[1])
    net = mlp([3, 7, 6, 2], nn.ReLU(), 0).double().requires_grad_(False)
    centre = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lower, upper = centre - 0.7, centre + 0.7
    least = [exact_minimum(net, lower, upper, row) for row in ROWS]
    for offset, verdict in ((-1e-3, Verdict.VERIFIED), (1e-3, Verdict.FALSIFIED)):
        specification = specification_of(lower, upper, ROWS, [least[0] - 1e-3, least[1] + offset], [0, 1])
        finding, heard = searched(replace(model_from(net, 3), settings=at_once), specification)
        assert finding.verdict is verdict
        bounds = [moment.bound for moment in heard]
        assert bounds == sorted(bounds)
        assert max(bounds) <= max(-offset, 0) + 1e-6
    assert supposed


def test_a_search_supposes_failure_until_the_proof_that_is_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer gains enough by itself for a second round, but the margin comes closer to a proof with each."""
    rounds, tighten = list[int](), Invprop.tighten
    monkeypatch.setattr(Invprop, "tighten", lambda *given: (rounds.append(len(given[3])), tighten(*given))[1])
    net = mlp([3, 7, 6, 2], nn.ReLU(), 0).double().requires_grad_(False)
    centre = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lower, upper = centre - 0.7, centre + 0.7
    patient = TimePlan(quick_share=0.0, quick_seconds=30.0)  # on a busy machine, too
    alone = replace(AT_ONCE.activations, invprop=InvpropSettings(least_layer_gain=1.0))
    model = replace(model_from(net, 3), settings=replace(AT_ONCE, time=patient, activations=alone))
    least = exact_minimum(net, lower, upper, ROWS[0])
    finding, _ = searched(model, specification_of(lower, upper, ROWS[:1], [least - 1e-3], [0]), seconds=1000)
    assert finding.verdict is Verdict.VERIFIED
    assert rounds == [1, 1]


def test_a_search_supposes_nothing_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of disjuncts there may be very many."""
    tick(monkeypatch)
    refined, supposed = list[object](), list[object]()

    def slowly(shared: SharedBounds, *given: object) -> Interval:
        refined.append(given)
        while time.monotonic() <= shared.deadline:
            pass
        return shared.bounds

    def suppose(*given: object) -> None:
        supposed.append(given)

    monkeypatch.setattr(SharedBounds, "tighter", slowly)
    monkeypatch.setattr(activations._ActivationSearch, "_tighten_disjunct", suppose)
    net, one = mlp([3, 7, 6, 2], nn.ReLU(), 0).double().requires_grad_(False), torch.ones(3, dtype=torch.float64)
    finding, _ = searched(
        replace(model_from(net, 3), settings=AT_ONCE),
        specification_of(-one, one, ROWS, [1e3, 1e3], [0, 1]),
        seconds=1000,
    )
    assert finding.verdict is not Verdict.VERIFIED
    assert refined
    assert not supposed


@pytest.mark.slow
def test_a_search_goes_on_without_the_memory_for_better_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refuse(*given: object, **named: object) -> None:
        refused.append(given)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(shared_bounds, "optimise_intermediate_bounds", refuse)
    monkeypatch.setattr(Invprop, "tighten", refuse)
    net = mlp([3, 9, 8, 2], nn.ReLU(), 0).double().requires_grad_(False)
    lower, upper = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    least = exact_minimum(net, lower, upper, ROWS[0])
    for offset, verdict in ((-1e-2, Verdict.VERIFIED), (1e-2, Verdict.FALSIFIED)):
        finding, _ = searched(
            replace(model_from(net, 3), settings=AT_ONCE),
            specification_of(lower, upper, ROWS[:1], [least + offset], [0]),
        )
        assert finding.verdict is verdict
    assert refused


class Counted(SharedBounds):
    """Bounds that only count how many relaxations they still need, and how long they would be refined."""

    def __init__(self, relaxed: list[int]) -> None:
        self.model, self.is_optimised = model_named("relu", 0), True
        self.relaxed, self.seconds = iter(relaxed), list[float]()

    def count_inexact_relaxations(self) -> int:
        return next(self.relaxed)

    def tighter(self, seconds: float, until: float) -> Interval:
        self.seconds.append(seconds)
        return Interval(torch.zeros(1), torch.zeros(1))


class Looking(activations._ActivationSearch):
    """A search of such bounds, in which one domain waits."""

    def __init__(self, relaxed: list[int]) -> None:
        self.pool, self.roots = waiting(-torch.ones(1), 1)
        self.model, one = model_named("relu", 0), torch.ones(3, dtype=torch.float64)
        self.domain_bounds = bounding_of(self.model, -one, one, torch.eye(2, dtype=torch.float64))
        self.time, self.until = TimePlan(), inf
        self.refinement = RefinementTimes(self.time, time.monotonic() - 1000, inf)
        self.counted = self.shared = Counted(relaxed)

    def _tighten(self, bounds: Interval) -> None: ...

    def _tighten_by_invprop(self, seconds: float) -> None: ...


@pytest.mark.parametrize(
    ("relaxed", "times"), [([100, 70, 70, 50, 50, 48], [1, 2, 4]), ([100, 90], [1]), ([0, 0], [1])]
)
def test_refinement_goes_on_while_it_makes_relaxations_exact(relaxed: list[int], times: list[int]) -> None:
    """Looked at before each time and after it: a gain of 30 % is worth twice the time at once, one of 10 % is not."""
    search = Looking(relaxed)
    search._refine_in_time()
    seconds = search.counted.seconds
    assert [each / seconds[0] for each in seconds] == pytest.approx(times)
    assert search.refinement.due > time.monotonic()
    assert next(search.counted.relaxed, None) is None


def test_a_search_that_is_about_to_end_refines_nothing() -> None:
    """At 1,000 s refinement is long due; of a hundred domains one is left after the last second."""
    search = Looking([])
    search.refinement.note(100, 999.0)
    slow = SearchStatus(open=100, seconds=1000.0, is_slow=True)
    assert search._shall_refine(slow)
    assert not search._shall_refine(replace(slow, open=1))
    assert not search._shall_refine(replace(slow, is_slow=False))


def waiting(
    margins: Tensor, disjuncts: int, settings: Callable[[Domains], PoolSettings] = lambda _: PoolSettings()
) -> tuple[DomainPool, Domains]:
    """A pool of domains with these margins, of each disjunct in turn, and the same domains."""
    domain_bounds = bounding_of(
        model_named("relu", 0), torch.zeros(3).double(), torch.ones(3).double(), torch.eye(2).double()
    )
    domains = random_domains(domain_bounds, len(margins), 2, torch.Generator().manual_seed(0))
    domains = domains.with_(margin=margins.double(), disjunct=torch.arange(len(margins)) % disjuncts)
    pool = DomainPool(domains, settings=settings(domains))
    pool.put(domains)
    return pool, domains


def test_a_pool_in_which_much_waits_gives_what_is_nearly_proved() -> None:
    margins = -torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pool, domains = waiting(margins, 1, lambda all_: PoolSettings(crowded_bytes=all_.bytes * 20 // 40))
    falling = domains.margin.sort(descending=True).values
    assert torch.equal(torch.cat([pool.take(5).margin for _ in range(4)]), falling[:20])
    assert torch.equal(torch.cat([pool.take(5).margin for _ in range(4)]), falling[20:].flip(0))
    assert len(pool) == 0


def test_a_pool_in_which_much_waits_loses_nothing_that_has_no_bound() -> None:
    crowded = PoolSettings(crowded_bytes=0)
    pool, _ = waiting(torch.tensor([-1.0, -torch.inf, -2, -torch.inf]), 4, lambda _: crowded)
    taken = [pool.take(1).disjunct.item() for _ in range(4)]
    assert taken[:2] == [0, 2]
    assert set(taken[2:]) == {1, 3}


def test_a_pool_without_memory_for_others_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (pool, domains), widened = waiting(-torch.arange(1.0, 7), 2), domains_of_searches._widen_column
    pool.take(2)

    def refuse(column: Tensor, name: str, depth: int) -> Tensor:
        if name == "slopes":
            raise torch.OutOfMemoryError
        return widened(column, name, depth)

    with monkeypatch.context() as scarce:
        scarce.setattr(domains_of_searches, "_widen_column", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            pool.replace(1, domains.rows(slice(5, 6)))
    assert pool.take(3).margin.tolist() == [-4, -3, -2]
    pool.replace(0, domains.rows(slice(2, 3)))
    assert pool.take(9).margin.tolist() == [-3]
    assert len(pool) == 0


def test_a_pool_drops_the_domains_of_one_disjunct() -> None:
    pool, _ = waiting(-torch.arange(1.0, 11), 2)
    assert (pool.bound_of(0), pool.bound_of(1), pool.bound_of(2)) == (-9, -10, float("inf"))
    pool.drop(1)
    assert len(pool) == 5
    assert pool.disjuncts.tolist() == [0]
    assert pool.take(10).margin.tolist() == [-9, -7, -5, -3, -1]
    assert len(pool) == 0
