"""Batches of domains that share a record: what is replayed is what was written, whatever the sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import slow_but_for
from recording_without_device import Rehearsed
from search_problems import NETS, bounding_and_batches, bounding_of, model_named

from service.bounds.interval import Interval
from service.bounds.network import prepare
from service.bounds.replay import Memory, Plain, Recorded
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.dual_objective import DisjunctRows, DualObjective
from service.verification.bab.activations.recorded_optimisation import (
    DirectOptimisation,
    RecordedOptimisation,
    _DomainOptimiser,
    padded_size,
)
from service.verification.bab.settings import OptimiserSettings


def of_records(domain_bounds: DomainBounds, repeat: Callable[[], Any], free: int = 2**40) -> RecordedOptimisation:
    return RecordedOptimisation(domain_bounds.objective, 1, lambda: free, lambda memory: repeat())


def moved(name: str, device: torch.device) -> DualObjective:
    """The objective of :func:`bounding_and_batches` on a device."""
    objective = bounding_and_batches(name, [])[0].objective
    module = copy.deepcopy(model_named(name, 3).module).to(device)
    network = prepare(module, (3,))
    rows = objective.specification_rows
    specification_rows = DisjunctRows(
        network.graph.output.name, rows.rows.to(device), rows.offsets.to(device), rows.used.to(device)
    )
    box, bounds = (Interval(each.lower.to(device), each.upper.to(device)) for each in (objective.box, objective.bounds))
    return DualObjective(network, box, bounds, specification_rows)


BATCHES = [(5, 3), (8, 2), (1, 1), (7, 0), (12, 3), (3, 0)]


@pytest.mark.parametrize("name", slow_but_for(NETS, "gate"))
def test_what_is_replayed_is_what_would_run(name: str) -> None:
    """To the last bit, of batches that share a record and hold other domains each time."""
    domain_bounds, batches = bounding_and_batches(name, BATCHES)
    settings = OptimiserSettings(7, slope_step=0.1)
    rehearsed, plain = (of_records(domain_bounds, kind) for kind in (Rehearsed, Plain))
    for domains in batches:
        replayed, run = (each.optimise(domains, settings, domain_bounds.scale) for each in (rehearsed, plain))
        alone = DirectOptimisation(domain_bounds.objective).optimise(domains, settings, domain_bounds.scale)
        assert (replayed.margin > domains.margin).any()
        for column, found in replayed.columns.items():
            assert torch.equal(found, run.columns[column]), column
            torch.testing.assert_close(found, alone.columns[column], rtol=1e-6, atol=1e-6)
    shared = [each.stepping.tape for each in rehearsed._kept.values()]
    assert 0 < len(shared) < len(batches)
    assert all(each is not None for each in shared)


def test_domains_that_are_proved_end_a_replayed_ascent_early() -> None:
    domain_bounds, (domains,) = bounding_and_batches("relu", [(4, 1)])
    domain_bounds.specification_rows.offsets.fill_(-100)
    rehearsed = of_records(domain_bounds, Rehearsed)
    found = rehearsed.optimise(domains, OptimiserSettings(50, slope_step=0.1), domain_bounds.scale)
    assert (found.margin > 0).all()
    (optimiser,) = rehearsed._kept.values()
    assert optimiser.stepping.runs == 5


def test_what_needs_the_host_or_counts_in_python_would_be_noticed() -> None:
    x, calls = torch.ones(3), []

    def counting() -> None:
        calls.append(1)
        x.add_(len(calls))

    Rehearsed().run(counting, 4)
    assert len(calls) == 2
    assert float(x[0]) == 1 + 1 + 2 + 2 + 2
    for body in (lambda: x.sum().item(), x.nonzero, lambda: x.add_(torch.tensor(1.0)), lambda: x[x > 0]):
        with pytest.raises(AssertionError, match="needs the host"):
            Rehearsed().run(body, 2)


def test_records_that_were_not_used_for_longest_make_room() -> None:
    domain_bounds, batches = bounding_and_batches("relu", [(8, 1), (16, 1), (32, 1), (8, 1), (64, 1)])
    settings = OptimiserSettings(2, slope_step=0.1)
    # A quarter of what is free, as it is without records, holds 50 domains at a time.
    records = of_records(domain_bounds, Plain)
    records.free = lambda: 200 - sum(size.domains for size in records._kept)
    held = []
    for domains in batches:
        records.optimise(domains, settings, domain_bounds.scale)
        held.append([size.domains for size in records._kept])
    assert held == [[8], [8, 16], [16, 32], [32, 8], [32, 8]]
    records.forget()
    assert not records._kept


@given(st.integers(0, 10**5), st.sampled_from([1, 8]))
def test_a_batch_is_filled_up_to_one_of_few_sizes(count: int, least: int) -> None:
    size = padded_size(count, least, 64)
    assert size >= count
    assert size <= max(least if count else 0, 2 * count if count <= 64 else 1.25 * count)
    assert padded_size(size, least, 64) == size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.cuda
@pytest.mark.parametrize("name", NETS)
def test_records_of_a_device_give_what_runs_there(name: str) -> None:
    domain_bounds, batches = bounding_and_batches(name, BATCHES)
    device, settings = torch.device("cuda", 0), OptimiserSettings(7, slope_step=0.1)
    objective = moved(name, device)
    scale = domain_bounds.scale.to(device)
    recorded = RecordedOptimisation(objective, 1, lambda: 2**40, lambda memory: Recorded(device, memory))
    plain = RecordedOptimisation(objective, 1, lambda: 2**40, lambda memory: Plain())
    for domains in (each.to(device) for each in batches):
        found, expected = (each.optimise(domains, settings, scale) for each in (recorded, plain))
        for column, value in found.columns.items():
            torch.testing.assert_close(value, expected.columns[column], rtol=0, atol=0)
    assert recorded._kept.memory.bytes > 0
    while recorded._kept:  # as where there is room for one only: the memory stays without a record
        recorded._kept.drop_oldest()
    again = batches[0].to(device)
    found, expected = (each.optimise(again, settings, scale) for each in (recorded, plain))
    torch.testing.assert_close(found.margin, expected.margin, rtol=0, atol=0)
    recorded.forget()
    assert recorded.held == 0


def test_records_share_their_memory_until_they_are_forgotten() -> None:
    domain_bounds, batches = bounding_and_batches("relu", [(8, 1), (16, 1)])
    used = []

    def repeat(memory: Memory) -> Plain:
        used.append(memory)
        memory.bytes = 60
        return Plain()

    records = RecordedOptimisation(domain_bounds.objective, 1, lambda: 2**40, repeat)
    settings = OptimiserSettings(1, slope_step=0.1)
    for domains in batches:
        records.optimise(domains, settings, domain_bounds.scale)
    assert len(used) == 2 * len(batches)
    assert {id(each) for each in used} == {id(records._kept.memory)}
    assert records.held == 60
    records.forget()
    assert records.held == 0
    records.optimise(batches[0], settings, domain_bounds.scale)
    assert used[-1] is records._kept.memory
    assert used[-1] is not used[0]


@pytest.mark.parametrize(("doubts_after", "ends_early"), [(-torch.inf, True), (torch.inf, False)])
def test_an_ascent_that_would_leave_a_domain_open_at_its_pace_ends_after_the_moment_of_doubts(
    doubts_after: float, ends_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No multipliers prove that y0 + y1 is positive and negative."""
    taken, step = list[int](), _DomainOptimiser._step

    def counting(self: _DomainOptimiser) -> None:
        taken.append(1)
        step(self)

    monkeypatch.setattr(_DomainOptimiser, "_step", counting)
    centre = torch.zeros(3, dtype=torch.float64)
    for sign in (1, -1):
        rows = sign * torch.ones(1, 2, dtype=torch.float64)
        domain_bounds = bounding_of(model_named("relu", 0), centre - 1, centre + 1, rows)
        roots = domain_bounds.roots(torch.full((1, 1), -torch.inf, dtype=torch.float64))
        domain_bounds.optimise(roots, OptimiserSettings(20, slope_step=0.1, doubts_after=doubts_after))
    assert (len(taken) < 40) == ends_early
