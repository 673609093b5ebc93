"""What one job finds out of the host's compiler is known to the next of its owner."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.codecache
import torch._inductor.config
from programs import clean
from torch._inductor import cpu_vec_isa
from torch._inductor.exc import InvalidCxxCompiler
from waiting import LIMIT_S, eventually

from service.compilation import job, prepare
from service.compilation.climber_process import ClimbTask
from service.compilation.instruments import toolchain
from service.compilation.instruments.caches import take_machine_code
from service.compilation.instruments.toolchain import Toolchain
from service.compilation.run.observation import RungCase
from service.compilation.rungs import RUNGS
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.arithmetic import CompileChoice
from service.jobs.spec.compile import CompileSpec
from service.models import host_compiler
from service.models.host_compiler import VectorProbes, reuse_compiler
from service.training.gate import load_caches

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="torch tries vector instructions of x86 alone")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What torch tries, of a processor that has AVX2; all of it works."""
    codes: list[str] = []
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: not codes.append(code))
    forget()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        yield codes
    forget()


def forget() -> None:
    host_compiler._clear(cpu_vec_isa)
    for kind in host_compiler._kinds(cpu_vec_isa.VecISA):
        host_compiler._clear(kind)


def test_what_a_kernel_shows_is_not_tried_and_is_kept_when_it_ran(tmp_path: Path, tried: list[str]) -> None:
    probes = VectorProbes(tmp_path)
    probes.assume()
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"
    assert not tried
    assert len(probes.assumed) == 1
    assert not list(tmp_path.rglob("*"))
    probes.keep()
    forget()
    VectorProbes(tmp_path).forget()
    assert not tried
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"


def test_what_was_assumed_is_tried_where_the_kernel_did_not_run(tmp_path: Path, tried: list[str]) -> None:
    probes = VectorProbes(tmp_path)
    probes.assume()
    probes.forget()
    assert len(tried) == 1
    assert not probes.assumed
    other = VectorProbes(tmp_path)
    other.forget()
    assert len(tried) == 1


def test_a_toolchain_that_does_not_start_is_tried_once_more_without_assumptions(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_header_to_prepare", lambda: None)
    started: list[int] = []

    def compile_once(chain: Toolchain) -> None:
        started.append(len(tried))
        if len(started) == 1:
            raise RuntimeError("undefined symbol")

    monkeypatch.setattr(Toolchain, "_compile", compile_once)
    Toolchain(CPU, tmp_path).start()
    assert started == [0, 1]
    monkeypatch.setattr(Toolchain, "_compile", lambda chain: tmp_path.joinpath("none").read_text())
    with pytest.raises(FileNotFoundError):
        Toolchain(CPU, tmp_path).start()


def test_a_training_with_a_gate_begins_with_what_the_check_kept(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", "")
    monkeypatch.setattr("torch._inductor.codecache._HEADER_LOCK_DIR", "")
    probes = VectorProbes(tmp_path)
    probes.assume()
    probes.keep()
    forget()
    context = RunContext("job_x", 1, 0, 0, 1, "cpu", DataLayout(tmp_path), NullReporter(), lambda: False)
    load_caches(CompileChoice(train=True, gate="job_" + "1" * 20), {"train": "inductor"}, context)
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"
    assert not tried
    assert str(tmp_path / "precompiled_headers") == torch._inductor.codecache._HEADER_DIR


def test_what_is_compiled_already_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", "")
    monkeypatch.setattr("torch._inductor.codecache._HEADER_LOCK_DIR", "")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", find_none)
    reuse_compiler()
    assert not (tmp_path / "probes").exists()


def test_headers_are_prepared_meanwhile_and_waited_for(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(toolchain, "_header_to_prepare", lambda: lambda: done.append("headers"))
    monkeypatch.setattr(Toolchain, "_compile", lambda chain: done.append("kernel"))
    chain = Toolchain(CPU, tmp_path)
    chain.begin()
    assert chain.start() >= 0
    assert done == ["headers", "kernel"]


@pytest.mark.parametrize(("rung", "done"), [("inductor", ["code generation", "program"]), ("aot_eager", ["program"])])
def test_code_generation_begins_before_the_program_is_built_where_a_rung_needs_it(
    rung: str, done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def build(*_: object) -> SimpleNamespace:
        seen.append("program")
        return SimpleNamespace(program=clean.PERCEPTRON, subject=None)

    monkeypatch.setattr(prepare, "target_of", build)
    monkeypatch.setattr(Toolchain, "begin", lambda chain: seen.append("code generation"))
    monkeypatch.setattr(ClimbTask, "climb", lambda task, prepare, seat: prepare())
    spec = CompileSpec.model_validate({"model": {"family": "mlp", "in_features": 2, "hidden": [2], "out_features": 2}})
    where = RunContext("job_x", 1, 0, 0, 1, "cpu", DataLayout(tmp_path), NullReporter(), lambda: False)
    seat: Any = None
    job.serve(spec, where, seat, ClimbTask((((RungCase(RUNGS[rung], "train"),),),)))
    assert seen == done


def test_on_a_gpu_the_kernel_is_compiled_meanwhile_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    may_end = threading.Event()

    def compile_once(chain: Toolchain) -> None:
        threads.append(threading.current_thread().name)
        assert may_end.wait(LIMIT_S)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Toolchain, "_compile", compile_once)
    chain = Toolchain(torch.device("cuda"), tmp_path)
    chain.begin()
    eventually(lambda: threads == ["toolchain"])
    may_end.set()
    chain.start()
    assert threads == ["toolchain", threading.current_thread().name]


def test_the_header_of_generated_kernels_is_found(tmp_path: Path, tried: list[str]) -> None:
    prepare = toolchain._header_to_prepare()
    assert prepare is not None
    assert prepare.args[0] == "torch/csrc/inductor/cpp_prefix.h"  # type: ignore[attr-defined]


def test_machine_code_goes_where_inductor_looks_for_it_and_nothing_else(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    for name in ("ab/one.main.so", "ab/one.main.cpp", "triton/x/other.so"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("new")
    (target / "cd").mkdir(parents=True)
    take_machine_code(source, target)
    assert [str(each.relative_to(target)) for each in target.rglob("*") if each.is_file()] == ["ab/one.main.so"]
    (target / "ab" / "one.main.so").write_text("old")
    take_machine_code(source, target)
    assert (target / "ab" / "one.main.so").read_text() == "old"
