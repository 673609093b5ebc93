"""A rung that fails is traced to the smallest module and operator, with a script that shows it."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ladder_runs import Ascend
from programs.deep import WRONG, Deep
from programs.parts import program
from torch import Tensor, fx, nn
from waiting import eventually

from service.compilation.diagnosis import Diagnosis, Reproduction, diagnose
from service.compilation.diagnosis.graphs import Captured, UnsuitableError, check_alone, minimise
from service.compilation.diagnosis.script import ScriptOutcome, bisect, run, write
from service.compilation.report.summary import causes
from service.compilation.run.run_plan import plan_run
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Tolerance


@pytest.mark.slow
def test_a_wrong_operator_is_found_in_its_block_and_shown_by_a_script(ascend: Ascend, tmp_path: Path) -> None:
    deep = program(Deep)
    (result,) = ascend(deep, rungs=[Rung("planted", WRONG, compiles_backward=False)])
    assert result.verdict == "fail_parity"
    found = diagnose(deep, result, plan_run(deep, 4, Tolerance(), float), tmp_path)
    assert found is not None
    assert found.module == "model.blocks.1"
    assert found.reproduction.operators == 1
    assert found.reproduction.confirmed, found.reproduction
    assert found.reproduction.said.startswith("result 0 is off by")
    assert any((tmp_path / found.trace).iterdir())
    script = tmp_path / found.reproduction.script
    assert "torch.relu(" in script.read_text()
    assert "service" not in script.read_text()
    (sentence,) = causes([found])
    assert sentence == (
        "The smallest module that fails is model.blocks.1 (train, planted); "
        "diagnosis/train-planted/reproduction.py shows it."
    )
    repaired = script.with_name("repaired.py")
    repaired.write_text(script.read_text().replace(WRONG, "eager"))
    script.with_suffix(".safetensors").rename(repaired.with_suffix(".safetensors"))
    assert run(repaired, 120).said == "nothing is wrong"


def test_a_script_that_cannot_be_written_ends_no_job(
    ascend: Ascend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose graph takes complex128, which safetensors does not hold."""
    monkeypatch.setattr("service.compilation.diagnosis.script.save_file", lambda *_: {}[torch.complex128])
    deep = program(Deep)
    (result,) = ascend(deep, rungs=[Rung("planted", WRONG, compiles_backward=False)])
    found = diagnose(deep, result, plan_run(deep, 4, Tolerance(), float), tmp_path)
    assert found is not None
    assert found.reproduction.said.startswith("it could not be written: KeyError: torch.complex128")


def test_a_search_whose_time_is_up_says_so(ascend: Ascend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("service.compilation.diagnosis.diagnose"), "SEARCH_S", -1.0)
    deep = program(Deep)
    (result,) = ascend(deep, rungs=[Rung("planted", WRONG, compiles_backward=False)])
    found = diagnose(deep, result, plan_run(deep, 4, Tolerance(), float), tmp_path)
    assert found is not None
    assert (found.module, found.trials, found.ended) == (None, 0, True)
    assert found.row()["ended"]
    assert causes([found]) == ["The failing module was not found in time (train, planted)."]


def test_other_verdicts_name_their_cause_themselves(ascend: Ascend, tmp_path: Path) -> None:
    deep = program(Deep)
    (result,) = ascend(deep, rungs=[Rung("planted", "eager", compiles_backward=True)])
    assert result.verdict == "vacuous"
    assert diagnose(deep, result, plan_run(deep, 4, Tolerance(), float), tmp_path) is None


def chain(x: Tensor) -> Tensor:
    return torch.tanh(torch.sigmoid(torch.relu(torch.sin(x) + 1) * 3) - 2).cos()


def test_only_the_operator_that_fails_is_left() -> None:
    captured = Captured(fx.symbolic_trace(chain), (torch.ones(3, requires_grad=True),))

    def fails(part: Captured) -> bool:
        return any(node.target is torch.relu for node in part.graph.graph.nodes)

    smallest = minimise(captured, fails, deadline=float("inf"))
    assert [node.target for node in smallest.graph.graph.nodes if node.op == "call_function"] == [torch.relu]
    (given,) = smallest.inputs
    assert torch.equal(given.detach(), torch.sin(torch.ones(3)) + 1)
    assert given.requires_grad


def test_a_fault_that_needs_several_operators_keeps_them() -> None:
    captured = Captured(fx.symbolic_trace(chain), (torch.ones(3),))

    def fails(part: Captured) -> bool:
        targets = {node.target for node in part.graph.graph.nodes}
        return {torch.relu, torch.sigmoid} <= targets

    smallest = minimise(captured, fails, deadline=float("inf"))
    assert smallest.operators == 3
    assert minimise(captured, fails, deadline=0.0) is captured


def test_what_needs_its_program_is_no_script(tmp_path: Path) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    with pytest.raises(UnsuitableError, match="holds weight, which is no operator"):
        check_alone(Captured(fx.symbolic_trace(Holding()), (torch.ones(3),)))
    with pytest.raises(UnsuitableError, match="its graph takes a Odd"):
        check_alone(Captured(fx.symbolic_trace(chain), (torch.ones(3).as_subclass(Odd),)))
    with pytest.raises(UnsuitableError, match="its backend has no name"):
        write(Captured(fx.symbolic_trace(chain), (torch.ones(3),)), Rung("x", chain), Tolerance(), "why", tmp_path)


def test_a_script_that_does_not_end_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, started = tmp_path / "endless.py", tmp_path / "started"
    script.write_text(
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print(inner.pid, file=open({str(started)!r}, 'w'), flush=True)\n"
        "time.sleep(600)\n"
    )
    wait = subprocess.Popen.wait

    def until_started(process: Any, timeout: float | None = None) -> int:
        """As long as it takes until all processes are there, whatever the limit is."""
        if timeout is None:
            return int(wait(process))
        eventually(lambda: started.exists() and started.read_text().endswith("\n"))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_started)
    assert run(script, 8) == ScriptOutcome(None, "it was still running after 8 s")
    eventually(lambda: not runs(int(started.read_text())))


def test_a_script_has_its_processor_time_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("service.compilation.diagnosis.script"), "PROCESSOR_S", 1)
    script = tmp_path / "busy.py"
    script.write_text("while True: pass")
    assert run(script) == ScriptOutcome(None, "it took more than 1 s of a processor")


def test_what_ran_out_of_time_is_told_as_not_measured(tmp_path: Path) -> None:
    untimely = Reproduction("reproduction.py", 1, None, "it was still running after 300 s")
    found = Diagnosis("inductor", "train", "model", "off", 3, "trace", untimely, ended=True)
    assert causes([found]) == [
        "The smallest module that fails, of those tried in time, is model (train, inductor); reproduction.py was "
        "written; whether it fails in a process of its own was not measured, as it was still running after 300 s."
    ]
    unblamed = "the part of the compiler at fault was not measured: there was no time left to run it"
    assert bisect(tmp_path / "none.py", 0.0) == unblamed


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_what_a_script_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    script, started = tmp_path / "leaving.py", tmp_path / "started"
    script.write_text(
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(started)!r}, 'w').write(str(left.pid))\n"
        "print('wrong')\n"
        "sys.exit(1)\n"
    )
    begun = time.monotonic()
    found = run(script, 120)
    assert (found.shown, found.said) == (True, "wrong")
    assert time.monotonic() - begun < 120
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.read_text())).kill()


class Odd(Tensor):
    """A kind of tensor that a file does not hold."""
