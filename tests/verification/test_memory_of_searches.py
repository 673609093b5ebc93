"""Searches in little memory: they decide the same, or say why they cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from limited_memory import OPTIMISTIC, Claims, LimitedMemory, RandomFailures, size_of
from little_memory import CPU, LIMITS, WIDTHS, dense, on
from nets import mlp
from search_problems import exact_minimum, model_from, specification_of, split_activations, split_inputs, tick
from torch import Tensor, nn

from service.bounds.memory import (
    MemoryBudget,
    is_out_of_memory,
)
from service.bounds.methods import CROWN, BoundOptions
from service.bounds.replay import Plain
from service.verification.bab.activations import search as activations
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.recorded_optimisation import RecordedOptimisation
from service.verification.bab.decision import SearchProgress, SearchResult
from service.verification.bab.driver import decide
from service.verification.bab.lp import LinearPrograms
from service.verification.bab.settings import OptimiserSettings, SearchSettings
from service.verification.bab.time_plan import TimePlan
from service.verification.verdict import Verdict

ROW = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
BOTH = [split_inputs, split_activations]


@pytest.mark.parametrize(
    ("search", "honest", "limits"),
    slow_but_for(
        [
            (split_inputs, False, LIMITS[-1:]),
            *((search, honest, LIMITS) for search in BOTH for honest in (True, False)),
        ],
        (split_inputs, False, LIMITS[-1:]),
    ),
)
def test_searches_decide_the_same_in_little_memory(
    search: Callable[..., SearchResult], honest: bool, limits: list[float]
) -> None:
    """Down to four times the model's size, on either side of what an unlimited search proves of two disjuncts."""
    module = dense().double()
    width = 0.04
    lower, upper = (torch.full((WIDTHS[0],), end, dtype=torch.float64) for end in (0.3 - width, 0.3 + width))
    values = module(torch.stack([lower, upper, (lower + upper) / 2])) @ ROW[0]
    low = float(values.min()) - 2 * float(values.max() - values.min()) - 0.5
    high = float(values.max())
    rows, refused = torch.cat([ROW, ROW]), 0
    for threshold, verdict in ((low, Verdict.VERIFIED), (high, Verdict.FALSIFIED)):
        specification = specification_of(lower, upper, rows, [low - 1, threshold], [0, 1])
        for multiple in limits:
            limited = LimitedMemory(int(multiple * size_of(module)), module)
            subject = on(module, limited, honest=honest)
            with limited:
                finding = search(subject, specification, CROWN, time.monotonic() + 600, lambda _: None)
            assert finding.verdict is verdict, (multiple, finding)
            assert finding.shortage is None
            refused += limited.refused
    assert honest or refused


@pytest.mark.parametrize("search", BOTH)
def test_a_search_without_memory_for_the_smallest_step_says_so(search: Callable[..., SearchResult]) -> None:
    module = dense().double()
    one = torch.ones(WIDTHS[0], dtype=torch.float64)
    specification = specification_of(-one, one, ROW, [0.0], [0])
    limited = LimitedMemory(size_of(module) + 4096, module)
    subject = on(module, limited, honest=False)
    with limited:
        finding = unknown_of(lambda: search(subject, specification, CROWN, time.monotonic() + 600, lambda _: None))
    assert finding.verdict is Verdict.UNKNOWN
    assert finding.shortage is not None
    assert "are needed" in str(finding.shortage)
    assert "are free on cpu" in str(finding.shortage)


def unknown_of(search: Callable[[], SearchResult]) -> SearchResult:
    """What a decision makes of a search that memory ends."""
    try:
        return search()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return SearchResult(Verdict.UNKNOWN, None, 0, -torch.inf, MemoryBudget().shortage("the search", CPU, error))


def test_a_decision_without_memory_is_unknown_with_the_reason() -> None:
    from service.formats.vnnlib import Disjunct, Halfspace, Query

    module = dense().double()
    lower, upper = (-1.0,) * WIDTHS[0], (1.0,) * WIDTHS[0]
    query = Query(WIDTHS[0], 2, (Disjunct(lower, upper, (Halfspace(((0, 1.0), (1, -1.0)), -1e3),)),))
    limited = LimitedMemory(size_of(module) + 1024, module)
    subject = on(module, limited, honest=False)
    with limited:
        decision = decide(subject, query, CROWN, 30.0)
    assert decision.verdict is Verdict.UNKNOWN
    assert decision.shortage is not None
    whole = decide(replace(subject, options=BoundOptions()), query, CROWN, 30.0)
    assert (whole.verdict, whole.shortage) == (Verdict.VERIFIED, None)


def test_a_program_that_does_not_fit_the_host_is_not_tried() -> None:
    """It has a dimension for each input, and as many inputs go through the network at once."""
    from service.formats.vnnlib import Disjunct, Halfspace, Query

    module = mlp([300, 4, 1], nn.ReLU(), 0).requires_grad_(False)
    module[2].weight.abs_()
    module[2].bias.zero_()
    query = Query(300, 1, (Disjunct((-0.1,) * 300, (0.1,) * 300, (Halfspace(((0, 1.0),), 0.0, strict=True),)),))
    subject = replace(model_from(module, 300), options=BoundOptions(memory=MemoryBudget(meter=Claims(2**21))))
    decision = decide(subject, query, CROWN, 60.0, restarts=0)
    assert decision.verdict is Verdict.UNKNOWN
    assert decision.shortage is not None
    assert decision.shortage.stage == activations.PROGRAMS


class Unconvinced(nn.Module):
    """Whose outputs violate nothing: a search can then only end by a proof, or undecided."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([1e6, -1e6]).expand(len(x), 2)


@pytest.mark.parametrize(
    ("search", "refining", "seeds"),
    slow_but_for(
        [
            (search, refining, seeds)
            for search, refining in ((split_inputs, False), (split_activations, False), (split_activations, True))
            for seeds in (1, 6)  # three networks, each with failures from the start and from the first round on
        ],
        (split_inputs, False, 1),
        (split_activations, False, 1),
    ),
)
def test_no_domain_is_lost_when_memory_fails_anywhere(
    search: Callable[..., SearchResult], refining: bool, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A property that fails, by the exact minimum, in a corner of the box, and that no point may refute.

    Any operation may fail: a search that lost the domain with the corner would prove what is false.
    """
    tick(monkeypatch)
    quick = 0.0 if refining else 1e9
    settings = SearchSettings(time=TimePlan(quick_seconds=quick, quick_share=quick))
    failed = 0
    for seed in range(seeds):
        net = mlp([3, 7, 6, 2], nn.ReLU(), seed % 3).double().requires_grad_(False)
        lower, upper = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        least = exact_minimum(net, lower, upper, ROW[0])
        options = BoundOptions(memory=OPTIMISTIC)
        subject = replace(model_from(net, 3), float64_module=Unconvinced(), options=options, settings=settings)
        specification = specification_of(lower, upper, ROW, [least + 1e-3], [0])
        rate = 10.0 ** -(2 + seed % 3)
        # From the start, or from the first round on, which else only few searches reach.
        failures = RandomFailures(seed, rate if seed % 2 else 0.0)

        def started(_: SearchProgress, failures: RandomFailures = failures, rate: float = rate) -> None:
            failures.probability = rate

        with failures:
            finding = unknown_of(lambda: search(subject, specification, CROWN, time.monotonic() + 40, started))  # noqa: B023
        failed += failures.count
        assert finding.verdict is Verdict.UNKNOWN, (seed, finding)
        assert finding.bound <= 1e-9
    assert failed >= seeds


@pytest.mark.parametrize(
    ("search", "seeds"), slow_but_for([(search, seeds) for search in BOTH for seeds in (1, 3)], (split_inputs, 1))
)
def test_searches_prove_in_spite_of_failures(search: Callable[..., SearchResult], seeds: int) -> None:
    """What is true is proved when memory fails now and then: failing ends nothing that has a smaller step."""
    proved = 0
    for seed in range(seeds):
        net = mlp([3, 7, 6, 2], nn.ReLU(), seed % 3).double().requires_grad_(False)
        lower, upper = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        specification = specification_of(lower, upper, ROW, [exact_minimum(net, lower, upper, ROW[0]) - 0.05], [0])
        subject = replace(model_from(net, 3), options=BoundOptions(memory=OPTIMISTIC))
        with RandomFailures(seed, 1e-5):
            finding = unknown_of(lambda: search(subject, specification, CROWN, time.monotonic() + 600, lambda _: None))  # noqa: B023
        assert finding.verdict is not Verdict.FALSIFIED
        proved += finding.verdict is Verdict.VERIFIED
    assert proved


@pytest.mark.slow
def test_leaf_programs_without_memory_leave_their_domains_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1.00 MiB.")

    monkeypatch.setattr(LinearPrograms, "solve", refuse)
    monkeypatch.setattr(activations._ActivationSearch, "_optimise_from_scratch", lambda search, domains: domains)
    net = mlp([3, 7, 6, 2], nn.ReLU(), 1).double().requires_grad_(False)
    lower, upper = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    least = exact_minimum(net, lower, upper, ROW[0])
    subject = replace(model_from(net, 3), float64_module=Unconvinced())
    specification = specification_of(lower, upper, ROW, [least + 1e-6], [0])
    finding = split_activations(subject, specification, CROWN, time.monotonic() + 600, lambda _: None)
    assert finding.verdict is Verdict.UNKNOWN
    assert finding.shortage is None or finding.shortage.stage == activations.PROGRAMS


def test_records_that_do_not_fit_are_given_up_and_the_batch_is_bounded() -> None:
    from search_problems import bounding_and_batches

    class Failing(Plain):
        def run(self, body: Callable[[], None], times: int) -> None:
            raise torch.OutOfMemoryError

    domain_bounds, (domains,) = bounding_and_batches("relu", [(5, 1)])
    records = RecordedOptimisation(domain_bounds.objective, 1, lambda: 2**40, lambda memory: Failing())
    settings = OptimiserSettings(4, slope_step=0.1)
    found = records.optimise(domains, settings, domain_bounds.scale)
    expected = DomainBounds(domain_bounds.objective)
    expected.scale = domain_bounds.scale
    torch.testing.assert_close(found.margin, expected.optimise(domains, settings).margin, rtol=0, atol=0)
    assert not records._kept
