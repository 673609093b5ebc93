"""Memory that ends early, at every stage of a verification: verdicts stay right, and no domain is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lanes import slow_but_for
from limited_memory import Claims, LimitedMemory, size_of
from little_memory import CPU, LIMITS, WIDTHS, budget_of, dense, on
from nets import prepared
from search_problems import specification_of_cases
from torch import Tensor

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
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.optimise import Ascent
from service.verification.bab.attack import attack


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
        found = attack(subject, specification, restarts=10**5 if honest else None)
    assert found is not None
