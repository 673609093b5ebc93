"""An error of the host ends the job with its cause; one of the program or the compiler is a verdict."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from traceback import FrameSummary
from typing import Any

import pytest
import torch
from lanes import first_fast
from torch import fx
from torch._dynamo import symbolic_convert
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.exc import CppCompileError

from service.compilation.host_fault import HostFaultError, describe, raise_host_fault
from service.compilation.ladder import climb
from service.compilation.rungs import RUNGS, Rung
from service.compilation.selftest.faults import FaultyProgram
from service.compilation.selftest.run import PLAN
from service.torch_internals.table import TorchInternalMissing


def failing(error: Callable[[], Exception]) -> Rung:
    """Return a rung whose compiler raises ``error``."""

    def backend(_graph: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        raise error()

    return Rung("failing", backend)


def no_space() -> Exception:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/caches/kernel.cpp")


HOST = {
    "permissions": lambda: PermissionError(errno.EACCES, "Permission denied", "/tmp/torchinductor_root"),
    "disk": no_space,
    "memory": MemoryError,
    "a torch without a private name": lambda: TorchInternalMissing("torch._dynamo.utils"),
    "a program that compilers run": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "openssl"),
    "a process that compiles": lambda: SubprocException("Traceback …\nOSError: [Errno 28] No space left on device"),
    "a compiler that was killed": lambda: CppCompileError(
        ["g++"], "g++: fatal error: Killed signal terminated cc1plus"
    ),
    "an allocator": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
}


@pytest.mark.parametrize("error", first_fast(3, HOST.values()), ids=HOST)
def test_a_fault_of_the_host_within_a_compiler_is_no_verdict(error: Callable[[], Exception]) -> None:
    with pytest.raises(HostFaultError, match=type(error()).__name__):
        list(climb(FaultyProgram(), [failing(error)], ["train"], PLAN))


@pytest.mark.parametrize(
    "error",
    [
        lambda: RuntimeError("no lowering of this operator"),
        lambda: CppCompileError(["g++"], "error: expected ';' before '}' token"),
        lambda: RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
        lambda: NotImplementedError("Permission denied is a word of the program's own"),
    ],
)
def test_a_fault_of_the_compiler_is_a_verdict(error: Callable[[], Exception]) -> None:
    (result,) = climb(FaultyProgram(), [failing(error)], ["train"], PLAN)
    assert result.verdict == "fail_error"


def test_an_error_in_what_dynamo_traced_has_the_programs_line() -> None:
    places = (("net.py", 7), ("/site-packages/torch/nn.py", 3), ("/service/compilation/monitor/boundary_monitor.py", 9))
    error: Any = RuntimeError("no such product")
    error.real_stack = [FrameSummary(file, line, "forward") for file, line in places]
    assert describe(error) == "RuntimeError: no such product (net.py:7)"


def test_a_torch_that_lacks_what_the_check_looks_through_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(symbolic_convert.InliningInstructionTranslator, "inline_call")
    said = r"torch [\d.+a-z]+ has no torch\._dynamo\..*inline_call, which Trivet needs to see"
    with pytest.raises(TorchInternalMissing, match=said):
        list(climb(FaultyProgram(), [RUNGS["eager"]], ["train"], PLAN))


def test_the_cause_is_told_not_what_it_led_to() -> None:
    outer = RuntimeError("worker: it failed")
    outer.__cause__ = no_space()
    with pytest.raises(HostFaultError, match=r"OSError: \[Errno 28\] No space left on device: '/caches/kernel.cpp'$"):
        raise_host_fault(outer)


@pytest.mark.parametrize(("held", "is_host"), [(0.05, False), (0.5, True)])
def test_a_device_that_others_fill_is_at_fault_and_one_that_the_program_fills_is_not(
    monkeypatch: pytest.MonkeyPatch, held: float, is_host: bool
) -> None:
    total, own = 80e9, 30e9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total * (1 - held) - own, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    if not is_host:
        raise_host_fault(error)
        return
    with pytest.raises(HostFaultError, match="CUDA out of memory"):
        raise_host_fault(error)


def test_what_the_program_itself_does_not_find_is_its_own_fault() -> None:
    raise_host_fault(FileNotFoundError(errno.ENOENT, "No such file or directory", "words.txt"))
    raise_host_fault(subprocess.CalledProcessError(1, ["words"]))
