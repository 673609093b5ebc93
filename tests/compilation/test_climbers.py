"""Rungs in processes of their own: the results of one process, and crashes that end no job."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from climbing import EACH_PHASE, LOW, PHASES, WHOLE, Ending, climbed, is_compiled, prepared, skip_unless_it_can_fork
from ladder_runs import ascend, quick_plan
from programs import clean

from benchmarks.recording_reporter import RecordingReporter
from service.compilation import entry, forks, job, plans
from service.compilation.activity import Activity
from service.compilation.forks import Forks, Seat
from service.compilation.host_fault import HostFaultError
from service.compilation.ladder import climb
from service.compilation.prepare import Prepared
from service.compilation.program import Parts
from service.compilation.report.rows import rung_row
from service.compilation.run.observation import RungCase
from service.compilation.rungs import LADDER
from service.compilation.time_share import TimeShare
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.compile import MODES, CompileSpec, Phase
from service.jobs.spec.model import MlpConfig


@pytest.fixture(autouse=True)
def _forkable() -> None:
    skip_unless_it_can_fork()


def test_processes_come_to_what_one_process_comes_to() -> None:
    found, told = climbed(prepared(), (*EACH_PHASE[:1], (RungCase(LADDER[-1], PHASES[1]),)))
    alone = [*ascend(clean.PERCEPTRON), *ascend(clean.PERCEPTRON, LADDER[-1:], PHASES[1:])]
    timeless = {"compile_s", "step_ms", "eager_step_ms", "ratio", "noisy", "profile", "eager_profile", "cache_bytes"}
    rows = [[rung_row(result).items() for result in results] for results in ([each.result for each in found], alone)]
    ours, theirs = ([{name: row for name, row in items if name not in timeless} for items in each] for each in rows)
    assert ours == theirs
    assert [row["verdict"] for row in ours] == ["pass", "pass", "not_applicable"]
    assert len(set(told) - {os.getpid()}) == 2


@pytest.mark.parametrize("planned", [EACH_PHASE, WHOLE], ids=["a phase each", "one for all"])
def test_a_crash_is_told_of_its_rung_and_the_other_phase_goes_on(planned: plans.Plan) -> None:
    found, _ = climbed(prepared(Ending("train", signal.SIGSEGV)), planned)
    verdicts = {(each.result.case.phase, each.result.case.rung.name): each.result.verdict for each in found}
    assert verdicts == {
        ("train", "eager"): "fail_error",
        ("train", "aot_eager"): "not_reached",
        ("inference", "eager"): "pass",
        ("inference", "aot_eager"): "pass",
    }
    (finding,) = found[0].result.findings
    assert finding.message == "the compiled program crashes with SIGSEGV at eager"
    assert found[0].result.observation is not None
    assert found[0].result.observation.crashed


def test_a_program_that_crashes_uncompiled_is_told_from_one_that_its_compiler_breaks() -> None:
    found, _ = climbed(prepared(Ending("train", signal.SIGABRT, compiled=False)), EACH_PHASE[:1])
    assert found[0].result.findings[0].message == "the uncompiled program crashes with SIGABRT at eager"


def test_a_process_that_is_killed_alone_is_a_fault_of_the_host() -> None:
    with pytest.raises(HostFaultError, match="SIGKILL"):
        climbed(prepared(Ending("inference", signal.SIGKILL)), EACH_PHASE)


@dataclass(frozen=True)
class Hanging(Ending):
    """A sound program that never comes back from one of its phases, and says so in a file."""

    file: Path = Path(os.devnull)

    def _end(self, phase: Phase, parts: Parts) -> None:
        if phase == self.phase and is_compiled(parts) and not self.file.with_suffix(".seen").exists():
            self.file.touch()
            threading.Event().wait()


@dataclass(frozen=True)
class UntilItHangs(TimeShare):
    """Time without an end, until the file tells of a rung that hangs: that one has had its share."""

    file: Path = Path(os.devnull)

    def seconds(self, left: int) -> float:
        if not self.file.exists():
            return math.inf
        self.file.rename(self.file.with_suffix(".seen"))
        return 0.0


def test_a_rung_that_hangs_is_given_up_with_its_stacks_and_the_ladder_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "hangs"
    program, share = Hanging("train", 0, file=file), UntilItHangs(file=file)
    found, _ = climbed(prepared(program), WHOLE, share=share)
    assert [each.result.verdict for each in found] == ["timeout", "pass", "pass", "pass"]
    (finding,) = found[0].result.findings
    assert re.fullmatch(
        r"train/eager was given up after \d+ s, its share of timeout_s, at .+:\d+ in wait", finding.message
    )
    assert "in _end" in found[0].stacks


@dataclass(frozen=True)
class Crawling(Hanging):
    """A sound program that never comes back where it is compiled."""

    def _end(self, phase: Phase, parts: Parts) -> None:
        if is_compiled(parts):
            self.file.touch()
            threading.Event().wait()


@pytest.mark.slow
def test_every_rung_may_be_given_up(tmp_path: Path) -> None:
    """Each ends its process, and the report says so of all of them."""
    file, spec = tmp_path / "hangs", CompileSpec(model=MlpConfig(in_features=4, out_features=2), modes=MODES[:2])
    program, share = Crawling("train", 0, file=file), UntilItHangs(file=file)
    found, _ = climbed(prepared(program), WHOLE, share=share, spare=entry._spare(spec))
    assert [each.result.verdict for each in found] == ["timeout"] * 4


def test_a_slow_rung_is_given_up_between_two_iterations_and_the_next_is_tried() -> None:
    plan = replace(quick_plan(clean.PERCEPTRON, 4), share=TimeShare(ends=time.monotonic()))
    found = list(climb(clean.PERCEPTRON, LOW, ["train"], plan))
    assert [each.verdict for each in found] == ["timeout", "timeout"]
    assert "train/aot_eager was given up after" in found[1].findings[0].message


class Progressing(NullReporter):
    """Keeps the last progress."""

    last: dict[str, Any]

    def put(self, event: dict[str, Any]) -> None:
        self.last = event


def test_what_the_processes_do_is_told_with_the_time_until_the_slowest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reporter = Progressing()
    seen = Activity(reporter, 4)
    for process, cases in enumerate(EACH_PHASE):
        seen.begin(process, cases)
        seen.hear(process, f"{cases[0].phase}: eager PyTorch")
    assert "left_s" not in reporter.last
    now = 10.0
    seen.hear(0, "train: float64")
    assert reporter.last["phase"] == "train: float64; inference: eager PyTorch"
    assert "left_s" not in reporter.last  # the other has not ended a run
    seen.hear(1, "inference: float64")
    assert reporter.last["left_s"] == 110.0  # of twelve runs each, one has ended
    assert (reporter.last["done"], reporter.last["total"], reporter.last["share"]) == (0, 4, 0.083)
    seen.end(1)
    seen.publish(4)
    assert reporter.last["phase"] == "train: float64"
    assert (reporter.last["done"], reporter.last["share"]) == (4, 1.0)


def test_what_cannot_be_prepared_is_raised_here() -> None:
    def refuse() -> Prepared:
        raise ValueError("the mesh was not started")

    with pytest.raises(ValueError, match="the mesh was not started"):
        climbed(refuse, EACH_PHASE)


def test_what_runs_out_of_memory_beside_others_is_tried_again_alone(tmp_path: Path) -> None:
    plan = quick_plan(clean.PERCEPTRON, 4)

    def prepare() -> Prepared:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) <= len(EACH_PHASE):
            raise torch.OutOfMemoryError("planted: another process has the memory")
        return Prepared(clean.PERCEPTRON, plan, os.getpid())

    found, told = climbed(prepare, EACH_PHASE)
    assert [each.result.verdict for each in found] == ["pass"] * 4
    assert len(told) == 1


def test_no_more_is_begun_once_the_job_is_to_stop() -> None:
    found, _ = climbed(prepared(), EACH_PHASE, stop=True)
    assert {each.result.verdict for each in found} == {"not_reached"}


def test_a_process_that_has_started_a_device_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidia-uvm"
    device.touch()
    monkeypatch.setattr(forks, "_MEMORY_DEVICE", str(device))
    assert forks.can_fork()
    with device.open():
        assert not forks.can_fork()


def test_a_task_that_is_not_done_is_told_with_its_exception() -> None:
    def fails(seat: Seat) -> None:
        raise HostFaultError(f"no compiler for {seat.tasks.recv()}")

    processes = Forks.ready(fails, 1, 0)
    fork = processes.take("cpu")
    word, error = fork.told.recv()
    assert (word, str(error), fork.wait()) == (forks.RAISED, "no compiler for cpu", 0)
    processes.end()


class Reporter(RecordingReporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.slow
def test_a_job_climbs_in_processes_and_reports_as_in_one(data: DataLayout) -> None:
    model = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}
    wanted = CompileSpec.model_validate({"modes": ["eager", "aot_eager"], "shapes": [8], "model": model})
    reporter = Reporter()
    where = RunContext("job_" + "1" * 20, 1, 0, 0, 1, "cpu", data, reporter, lambda: False)
    processes = Forks.ready(lambda seat: entry._serve(wanted, where, seat), 3, 1)
    try:
        result = job.run(wanted, where, processes)
    finally:
        processes.end()
    assert result is not None
    assert result["verdicts"] == {"pass": 4}
    assert (result["gate"]["train"], result["gate"]["closed"]) == ("aot_eager", "")
    assert [line for line in reporter.lines if line.startswith("inference/aot_eager: pass")]
