"""Branch and bound over activations: bounds with splits hold, small networks are always decided, any time is sound."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, first_fast, slow_but_for
from nets import mlp, redraw
from search_problems import (
    NETS,
    bounding_of,
    evaluated,
    exact_minimum,
    least_sampled,
    model_from,
    model_named,
    random_domains,
    searched,
    specification_of,
    tick,
)
from torch import Tensor, nn
from verify_jobs import context
from verify_jobs import specification as of_digits

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Analysis, BoundOptions, Method
from service.bounds.network import Network
from service.bounds.optimise import Ascent
from service.bounds.split import Multipliers, Preactivations
from service.jobs.files import DataLayout
from service.verification import job
from service.verification.bab.activations import search as activations
from service.verification.bab.activations.branching import ActivationBranching
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import DomainPool, Domains
from service.verification.bab.activations.dual_objective import DualObjective
from service.verification.bab.activations.intermediate_bab import _Problems, refine_intermediate_bounds
from service.verification.bab.decision import Technique
from service.verification.bab.heuristics import Heuristics
from service.verification.bab.settings import ActivationSearchSettings, OptimiserSettings
from service.verification.engine import NetworkEngine
from service.verification.verdict import Verdict


@pytest.mark.parametrize("name", first_fast(1, sorted(NETS)))
@settings(max_examples=examples(2, 10), deadline=None)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 3), optimised=st.booleans())
def test_a_bound_with_splits_is_below_every_sample_that_satisfies_them(
    name: str, seed: int, depth: int, optimised: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    subject = model_named(name, seed % 2)
    centre = torch.randn(3, generator=generator, dtype=torch.float64)
    rows = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    domain_bounds = bounding_of(subject, centre - 0.4, centre + 0.4, rows)
    domains = random_domains(domain_bounds, 12, depth, generator)
    if optimised:
        domains = domain_bounds.optimise(domains, OptimiserSettings(15, slope_step=0.1))
        margins = domains.margin
    else:
        margins = domain_bounds.margins(domains)
    least = least_sampled(domain_bounds, domains, 1000, generator)
    assert bool((margins <= least + 1e-9).all()), (margins - least).max()


def test_multipliers_of_the_wrong_sign_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with the constraints turned round the optimiser climbs past the samples."""
    generator = torch.Generator().manual_seed(0)
    subject = model_named("relu", 0)
    centre = torch.zeros(3, dtype=torch.float64)
    domain_bounds = bounding_of(subject, centre - 0.4, centre + 0.4, torch.eye(2, dtype=torch.float64))
    domains = random_domains(domain_bounds, 64, 2, generator)
    right = Multipliers.coefficients
    monkeypatch.setattr(Multipliers, "coefficients", lambda self, entries: -right(self, entries))
    wrong = domain_bounds.optimise(domains, OptimiserSettings(30, slope_step=0.1))
    assert bool((wrong.margin > least_sampled(domain_bounds, wrong, 3000, generator) + 1e-2).any())


def test_optimised_multipliers_reach_the_minimum_over_the_halfspace() -> None:
    """One affine layer before the split, none after: the dual of a linear program, whose value is known."""

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x[:, :1] + x[:, 1:]
            return x[:, :1] - x[:, 1:] * 0 + 0.0 * torch.relu(z)

    subject = model_from(Positive(), 2)
    one = torch.ones(2, dtype=torch.float64)
    domain_bounds = bounding_of(subject, -one, one, torch.ones(1, 1, dtype=torch.float64))
    root = domain_bounds.roots(torch.full((1, 1), -torch.inf, dtype=torch.float64))
    zero, up = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    half = root.split_further(zero, up, 0 * up, 0 * up)
    # The least x0 with x0 + x1 ≥ 0 on the square is −1; with x0 + x1 ≥ 1 it would be 0.
    assert float(domain_bounds.optimise(half, OptimiserSettings(100, slope_step=0.1)).margin) == pytest.approx(
        -1, abs=1e-6
    )
    half = root.split_further(zero, up, up, 0 * up)
    assert float(domain_bounds.optimise(half, OptimiserSettings(200, slope_step=0.1)).margin) == pytest.approx(
        0, abs=0.02
    )


@pytest.mark.parametrize(("activation", "slope"), first_fast(1, [(nn.ReLU(), 0.0), (nn.LeakyReLU(0.2), 0.2)]))
@pytest.mark.parametrize("seed", slow_but_for(range(2), 0))
def test_small_networks_are_decided_on_both_sides_of_the_exact_minimum(
    activation: nn.Module, slope: float, seed: int
) -> None:
    net = mlp([3, 7, 6, 2], activation, seed).double()
    centre = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lower, upper = centre - 0.7, centre + 0.7
    row = torch.tensor([1.0, -1.0], dtype=torch.float64)
    least = exact_minimum(net.requires_grad_(False), lower, upper, row, slope)
    subject = model_from(net, 3)
    for offset, verdict in ((-1e-4, Verdict.VERIFIED), (1e-4, Verdict.FALSIFIED)):
        goal = specification_of(lower, upper, row[None], [least + offset], [0])
        finding, heard = searched(subject, goal)
        assert finding.verdict is verdict
        bounds = [moment.bound for moment in heard]
        assert bounds == sorted(bounds)
        # The proved margin is at most the exact one, whenever it is said.
        assert max(bounds) <= -offset + 1e-6
        if verdict is Verdict.FALSIFIED:
            assert finding.counterexample is not None
            x = torch.tensor(finding.counterexample, dtype=torch.float64)
            assert bool(((x >= lower) & (x <= upper)).all())
            assert float(net(x[None])[0] @ row) <= least + offset


def test_an_ascent_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, one = model_named("relu", 0), torch.ones(3, dtype=torch.float64)
    domain_bounds = bounding_of(subject, -one, one, torch.eye(2, dtype=torch.float64))
    roots = domain_bounds.roots(torch.full((1, 2), -torch.inf, dtype=torch.float64))
    steps, descent = [], DualObjective.descent
    monkeypatch.setattr(DualObjective, "descent", lambda *given: (steps.append(1), descent(*given))[1])
    found = domain_bounds.optimise(roots, replace(OptimiserSettings(1000, slope_step=0.1), deadline=time.monotonic()))
    assert len(steps) == OptimiserSettings(1000, slope_step=0.1).check_every
    assert bool(found.margin.isfinite().all())


def test_a_disjunct_needs_one_row_and_every_disjunct_one_of_its_own() -> None:
    """y0 ≤ t and y1 ≤ t together, or y1 ≤ u alone: rows must not be mixed across disjuncts."""
    net = mlp([3, 7, 6, 2], nn.ReLU(), 5).double().requires_grad_(False)
    lower, upper = -0.5 * torch.ones(3, dtype=torch.float64), 0.5 * torch.ones(3, dtype=torch.float64)
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    least = [exact_minimum(net, lower, upper, row) for row in rows[:2]]
    subject = model_from(net, 3)
    # y0 cannot reach its threshold, so the first disjunct is impossible whatever y1 does; the second one is possible.
    thresholds = [least[0] - 0.01, least[1] + 1.0, least[1] + 1e-3]
    finding, _ = searched(subject, specification_of(lower, upper, rows, thresholds, [0, 0, 1]))
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.counterexample is not None
    assert float(net(torch.tensor([finding.counterexample], dtype=torch.float64))[0, 1]) <= thresholds[2]
    thresholds[2] = least[1] - 1e-3
    finding, _ = searched(subject, specification_of(lower, upper, rows, thresholds, [0, 0, 1]))
    assert finding.verdict is Verdict.VERIFIED


def test_rows_of_a_disjunct_are_combined() -> None:
    """No single row is always positive, but never are all of them at most 0: |z| is what no single row sees."""

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(x.sum(dim=1, keepdim=True))
            return torch.cat([0.1 + z, 0.1 - z], dim=1)

    subject = model_from(Both(), 3)
    one = torch.ones(3, dtype=torch.float64)
    finding, heard = searched(
        subject, specification_of(-one, one, torch.eye(2, dtype=torch.float64), [0.0, 0.0], [0, 0])
    )
    assert finding.verdict is Verdict.VERIFIED
    # Half of each row is 0.1 exactly, before any split.
    assert heard[-1].domains == 1


@pytest.mark.slow
def test_time_that_is_over_gives_a_sound_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp([12, 40, 40, 2], nn.ReLU(), 0).double().requires_grad_(False)
    lower, upper = -torch.ones(12, dtype=torch.float64), torch.ones(12, dtype=torch.float64)
    row = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    x = lower + torch.rand(20000, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    sampled = float((net(x) @ row[0]).min())
    goal = specification_of(lower, upper, row, [sampled - 4.0], [0])
    subject = model_from(net, 12)
    tick(monkeypatch)
    finding, heard = searched(subject, goal, seconds=100)
    bounds = [moment.bound for moment in heard]
    assert bounds == sorted(bounds)
    assert finding.verdict is Verdict.UNKNOWN
    assert -torch.inf < bounds[0] < finding.bound == bounds[-1] <= 0


@given(st.integers(1, 500))
def test_a_longer_ascent_takes_smaller_steps_to_the_same_end(iterations: int) -> None:
    usual = OptimiserSettings(60, slope_step=0.1)
    settings = usual.within(BoundOptions(ascent=Ascent(iterations=iterations)))
    assert settings.iterations == 3 * iterations
    assert settings.decay**settings.iterations == pytest.approx(usual.decay**usual.iterations)
    assert usual.within(BoundOptions()) == usual


def test_a_job_tells_its_searches_how_long_to_optimise(trained: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the bounds of the whole box and those of domains."""
    climbs, optimisation = [], []
    climbing, analyse = DomainBounds.optimise, NetworkEngine.analyse

    def watched(self: DomainBounds, domains: Domains, settings: OptimiserSettings) -> Domains:
        climbs.append(settings.iterations)
        return climbing(self, domains, settings)

    def analysed(self: NetworkEngine, method: Method, box: Interval, options: BoundOptions) -> Analysis:
        optimisation.append(options.ascent.iterations)
        return analyse(self, method, box, options)

    monkeypatch.setattr(DomainBounds, "optimise", watched)
    monkeypatch.setattr(NetworkEngine, "analyse", analysed)
    deciding = importlib.import_module("service.verification.bab.driver")
    monkeypatch.setattr(deciding, "technique_for", lambda *_: Technique.ACTIVATIONS)
    digits = {"data": {"source": "digits"}, "count": 3, "eps": 0.05}
    # A slow machine would tighten what all domains share, and split none.
    monkeypatch.setattr(activations._ActivationSearch, "_refine_in_time", lambda self: None)
    budget = {"seconds": 100, "domains": 50, "iterations": 6, "restarts": 0}
    job.run(of_digits(property={"robustness": digits}, method="beta-crown", budget=budget), context(trained)[0])
    assert set(climbs) == {18, 2}
    assert set(optimisation) == {6}


def refined_bounds(network: Network, box: Interval, bounds: Interval, deadline: float) -> Interval:
    """Branch and bound for intermediate bounds as searches do it unless they are told otherwise."""
    scores, settings = Heuristics().activations, ActivationSearchSettings()
    return refine_intermediate_bounds(network, box, bounds, deadline, BoundOptions(), scores=scores, settings=settings)


def test_refined_bounds_are_tighter_and_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch)
    subject = model_named("relu", 1)
    centre = torch.zeros(3, dtype=torch.float64)
    domain_bounds = bounding_of(subject, centre - 0.5, centre + 0.5, torch.eye(2, dtype=torch.float64))
    before = domain_bounds.bounds
    after = refined_bounds(subject.network, domain_bounds.box, before, time.monotonic() + 300)
    assert float(after.width.sum()) < 0.98 * float(before.width.sum())
    x = domain_bounds.box.lower + torch.rand(20000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = evaluated(subject.network, x)
    hidden = domain_bounds.preactivations.flattened(
        {preactivation.value: values[preactivation.value] for preactivation in domain_bounds.preactivations.each}
    )
    assert bool(((hidden >= after.lower - 1e-9) & (hidden <= after.upper + 1e-9)).all())


def test_refining_looks_at_the_clock_between_parts() -> None:
    """Leaves whose turn comes too late stay as they are."""
    subject = model_named("relu", 1)
    centre = torch.zeros(3, dtype=torch.float64)
    domain_bounds = bounding_of(subject, centre - 0.5, centre + 0.5, torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    known = torch.tensor([-5.0], dtype=torch.float64)
    usual = ActivationSearchSettings()
    branching = ActivationBranching(domain_bounds, Heuristics().activations, usual.branching)
    problems = _Problems(branching, torch.zeros(1, dtype=torch.int64), known, BoundOptions(), usual.intermediate)
    (late,) = problems._split(problems.leaves, time.monotonic() - 1)
    assert len(late) == 1
    assert late.depth == 0
    halves = Domains.join(list(problems._split(problems.leaves, time.monotonic() + 600)))
    assert len(halves) == 2
    assert halves.depth == 1


def test_operators_that_read_each_other_are_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value may be the start of a question and relaxed itself."""

    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            redraw(self, torch.Generator().manual_seed(3))

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x))
            return self.last(hidden * self.second(hidden))

    tick(monkeypatch)
    subject = model_from(Fed(), 3)
    lower, upper = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    box = Interval(lower[None], upper[None])
    bounds = Preactivations.of(subject.network).bounds(METHODS["crown"](subject.network, box, BoundOptions()).inputs)
    found = refined_bounds(subject.network, box, bounds, time.monotonic() + 20)
    generator = torch.Generator().manual_seed(5)
    values = evaluated(subject.network, lower + torch.rand(200, 3, generator=generator, dtype=lower.dtype) * 2)
    held = Preactivations.of(subject.network).flattened(
        {preactivation.value: values[preactivation.value] for preactivation in Preactivations.of(subject.network).each}
    )
    assert (held >= found.lower - 1e-9).all()
    assert (held <= found.upper + 1e-9).all()
    assert (found.width <= bounds.width).all()
    assert float(found.width.sum()) < 0.99 * float(bounds.width.sum())


def test_margins_of_all_domains_are_found_while_memory_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model_named("relu", 1)
    domain_bounds = bounding_of(subject, -torch.ones(3).double(), torch.ones(3).double(), torch.eye(2).double())
    domains = random_domains(domain_bounds, 23, 2, torch.Generator().manual_seed(1))
    expected = domain_bounds.margins(domains)
    looks = iter([7, 3, 11, 2, 5, 13, 4, 6, 9, 8])
    monkeypatch.setattr(DomainBounds, "capacity", property(lambda self: next(looks)))
    torch.testing.assert_close(domain_bounds.margins(domains), expected)


def test_the_pool_gives_the_least_margins_first_and_loses_none() -> None:
    generator = torch.Generator().manual_seed(0)
    domain_bounds = bounding_of(
        model_named("relu", 0), torch.zeros(3).double(), torch.ones(3).double(), torch.eye(2).double()
    )
    pool = DomainPool(random_domains(domain_bounds, 1, 1, generator))
    margins = -torch.rand(40, generator=generator, dtype=torch.float64)
    for depth, part in enumerate(margins.split(10)):
        pool.put(random_domains(domain_bounds, 10, depth + 1, generator).with_(margin=part))
    assert len(pool) == 40
    assert pool.bound == float(margins.min())
    taken = [pool.take(7) for _ in range(6)]
    assert torch.equal(torch.cat([each.margin for each in taken]), margins.sort().values)
    assert len(pool) == 0


def test_contradicting_splits_leave_nothing_to_prove() -> None:
    generator = torch.Generator().manual_seed(0)
    domain_bounds = bounding_of(
        model_named("tanh", 0), -torch.ones(3).double(), torch.ones(3).double(), torch.eye(2).double()
    )
    root = domain_bounds.roots(torch.full((1, 2), -torch.inf, dtype=torch.float64))
    entry, one = torch.tensor([3]), torch.ones(1, dtype=torch.float64)
    lower, upper = domain_bounds.bounds.lower[0, entry], domain_bounds.bounds.upper[0, entry]
    high, low = lower + 0.75 * (upper - lower), lower + 0.25 * (upper - lower)
    empty = root.split_further(entry, one, high, 0 * one).split_further(entry, -one, low, 0 * one)
    assert float(domain_bounds.margins(empty)) == float("inf")
    assert bool(torch.isinf(least_sampled(domain_bounds, empty, 100, generator)).all())
