"""Memory that ends early, at every stage of a verification: verdicts stay right, and no domain is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from limited_memory import OPTIMISTIC, Claims, LimitedMemory, RandomFailures, size_of
from nets import mlp, prepared
from search_problems import exact_minimum, model_from, specification_of, specification_of_cases, tick
from torch import Tensor, nn

from service.bounds import memory as module_of_memory
from service.bounds.interval import Interval
from service.bounds.memory import (
    MemoryBudget,
    MemoryShortageError,
    SystemMeter,
    halving,
    in_parts,
    is_out_of_memory,
)
from service.bounds.methods import CROWN, METHODS, BoundOptions
from service.bounds.optimise import Ascent
from service.bounds.replay import Plain
from service.verification.bab.activations import search as activations
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.recorded_optimisation import RecordedOptimisation
from service.verification.bab.activations.search import split_activations
from service.verification.bab.attack import attack
from service.verification.bab.decision import SearchProgress, SearchResult, SearchStrategy
from service.verification.bab.driver import decide
from service.verification.bab.inputs.search import split_inputs
from service.verification.bab.lp import LinearPrograms
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import OptimiserSettings, SearchSettings
from service.verification.bab.time_plan import TimePlan
from service.verification.verdict import Verdict

CPU = torch.device("cpu")
WIDTHS = [6, 160, 160, 2]
"""Of a network whose weights take more than what is done with a few rows."""
LIMITS = [1000.0, 32.0, 8.0, 4.0]
"""As multiples of the model's size."""
ROW = torch.tensor([[1.0, -1.0]], dtype=torch.float64)


def budget_of(limited: LimitedMemory, *, honest: bool) -> MemoryBudget:
    """That knows what is free, or whose plans fail since it does not."""
    return MemoryBudget(meter=limited) if honest else OPTIMISTIC


def dense(seed: int = 0) -> nn.Module:
    return mlp(WIDTHS, nn.ReLU(), seed).eval().requires_grad_(False)


def test_a_plan_fits_what_is_free_and_the_limit() -> None:
    budget = MemoryBudget(meter=Claims(1000))
    assert budget.plan(CPU, 10, 7) == 7
    assert budget.plan(CPU, 10, 10**6) == 100
    assert budget.plan(CPU, 10, 10**6, share=2, kept=500) == 25
    assert MemoryBudget(400, Claims(1000)).plan(CPU, 10, 10**6) == 40
    assert MemoryBudget(400, Claims(1000, taken=150)).plan(CPU, 10, 10**6) == 25
    assert budget.plan(torch.device("cuda"), 10**6, 5) == 1  # a device says no itself


def test_a_step_that_does_not_fit_the_host_is_refused_with_what_it_needs() -> None:
    with pytest.raises(MemoryShortageError, match="2 KiB are needed, 1000 B are free on cpu"):
        MemoryBudget(meter=Claims(1000)).plan(CPU, 2048, 5)
    with pytest.raises(MemoryShortageError, match=r"within budget\.memory_gib=1"):
        MemoryBudget(2**30, Claims(2**20)).plan(CPU, 2**21, 5)


def test_ranks_refuse_together() -> None:
    """A rank that has enough memory does as the one that has not."""
    with pytest.raises(MemoryShortageError):
        MemoryBudget(meter=Claims(1000)).plan(CPU, 10, 5, least=lambda count: 0)
    assert MemoryBudget(meter=Claims(1000)).plan(CPU, 10, 5, least=lambda count: min(count, 3)) == 3


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_the_many_ways_to_say_that_memory_ran_out(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory
    outer = ValueError("the model cannot be traced")
    outer.__cause__ = error
    assert is_out_of_memory(outer) is is_memory


@pytest.mark.slow
def test_torch_itself_is_understood_when_the_system_refuses() -> None:
    """A process of 2 GiB of addresses: a real failure of torch's allocator on the host, with the bytes it tried."""
    script = (
        "import resource, torch\n"
        "from service.bounds.memory import UNLIMITED, is_out_of_memory\n"
        "device, now = torch.device('cpu'), int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, resource.RLIM_INFINITY))\n"
        "assert UNLIMITED.free(device) <= 2**28\n"
        "try:\n    torch.empty(2**40, dtype=torch.uint8)\n"
        "except Exception as error:\n    print(is_out_of_memory(error), UNLIMITED.shortage('a test', device, error))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("True out of memory in a test: 1 TiB are needed, ")


def test_parts_are_halved_until_they_fit_and_nothing_is_left_out() -> None:
    taken: list[tuple[int, int]] = []

    def run(part: slice) -> list[int]:
        if part.stop - part.start > 3:
            raise torch.OutOfMemoryError
        taken.append((part.start, part.stop))
        return list(range(part.start, part.stop))

    found = in_parts(20, 16, run, CPU)
    assert [each for part in found for each in part] == list(range(20))
    assert taken[0] == (0, 2)
    assert in_parts(0, 5, run, CPU) == []


def test_what_is_raised_at_a_size_of_one_or_where_others_wait_is_raised() -> None:
    sizes: list[int] = []

    def never(size: int) -> None:
        sizes.append(size)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        halving(5, never, CPU)
    assert sizes == [5, 3, 2, 1]
    with pytest.raises(torch.OutOfMemoryError):
        halving(5, never, CPU, alone=False)
    assert sizes == [5, 3, 2, 1, 5]


def test_groups_limit_what_is_free_on_the_host(tmp_path: Path) -> None:
    """Control groups of both versions, from this process' own to the root."""
    root, inner = tmp_path / "cgroup", tmp_path / "cgroup" / "jobs" / "one"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("700\n")
    (inner.parent / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    old = root / "memory" / "jobs"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("900\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/jobs/one\n4:cpu,memory:/jobs\n3:cpuset:/jobs\n")
    assert module_of_memory._group_rooms(root, membership) == [350, 800]
    assert module_of_memory._group_rooms(root, tmp_path / "none") == []


def test_a_device_has_what_torch_holds_without_using_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    cuda = torch.device("cuda")
    assert MemoryBudget().free(cuda) == 5700
    assert MemoryBudget(600).free(cuda) == 400
    assert MemoryBudget(100).free(cuda) == 0


def test_a_host_is_asked_for_its_own_memory() -> None:
    meter = SystemMeter()
    assert 0 < meter.used(CPU) < 2**40
    assert 0 < meter.free(CPU) < 2**44


@pytest.mark.parametrize("honest", slow_but_for([True, False], False))
@pytest.mark.parametrize(
    "method", slow_but_for([*METHODS, *(f"{name}, rigorous" for name in METHODS)], "crown", "crown, rigorous")
)
def test_bounds_by_every_method_are_the_same_in_little_memory(method: str, honest: bool) -> None:
    """Of the layers and of the output's rows, in as many parts as it takes."""
    name, _, rigorous = method.partition(", ")
    module = dense().double()
    network = prepared(module, WIDTHS[0])
    centre = torch.linspace(-1, 1, WIDTHS[0], dtype=torch.float64).expand(2, -1)
    box, rows = Interval(centre - 0.05, centre + 0.05), torch.eye(2, dtype=torch.float64)[None]
    chosen, ascent = METHODS[name], Ascent(iterations=2)
    analyse = chosen.rigorous if rigorous else chosen.plain

    @torch.no_grad()
    def bounds(memory: MemoryBudget) -> Tensor:
        return analyse(network, box, BoundOptions(ascent=ascent, memory=memory)).lower_bounds(rows)

    expected, refused = bounds(MemoryBudget()), 0
    for multiple in LIMITS:
        limited = LimitedMemory(int(multiple * size_of(module)), module)
        with limited:
            found = bounds(budget_of(limited, honest=honest))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        refused += limited.refused
    assert limited.most <= 4 * size_of(module)
    assert honest or refused or "ibp" in name


def on(module: nn.Module, limited: LimitedMemory, *, honest: bool) -> ModelUnderVerification:
    subject = model_from(module, WIDTHS[0])
    return replace(subject, options=BoundOptions(memory=budget_of(limited, honest=honest)))


@pytest.mark.parametrize("honest", [True, False], ids=["planned", "taken meanwhile"])
@pytest.mark.parametrize("multiple", slow_but_for(LIMITS, LIMITS[-1]))
def test_an_attack_goes_on_in_little_memory(multiple: float, honest: bool) -> None:
    module = dense().double()
    limited = LimitedMemory(int(multiple * size_of(module)), module)
    subject = on(module, limited, honest=honest)
    lower, upper = [-1.0] * WIDTHS[0], [1.0] * WIDTHS[0]
    at_centre = module(torch.zeros(1, WIDTHS[0], dtype=torch.float64))[0]
    specification = specification_of_cases(
        lower, upper, [({0: 1.0, 1: -1.0}, float(at_centre[0] - at_centre[1]) - 0.01)]
    )
    with limited:
        found = attack(subject, specification)
    assert found is not None


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
def test_searches_decide_the_same_in_little_memory(search: SearchStrategy, honest: bool, limits: list[float]) -> None:
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
def test_a_search_without_memory_for_the_smallest_step_says_so(search: SearchStrategy) -> None:
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
            for seeds in (1, 12)
        ],
        (split_inputs, False, 1),
        (split_activations, False, 1),
    ),
)
def test_no_domain_is_lost_when_memory_fails_anywhere(
    search: SearchStrategy, refining: bool, seeds: int, monkeypatch: pytest.MonkeyPatch
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
    ("search", "seeds"), slow_but_for([(search, seeds) for search in BOTH for seeds in (1, 6)], (split_inputs, 1))
)
def test_searches_prove_in_spite_of_failures(search: SearchStrategy, seeds: int) -> None:
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
