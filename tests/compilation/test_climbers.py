"""Rungs in processes of their own: the results of one process, and crashes that end no job."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_runs import ascend, quick_plan
from programs import clean

from benchmarks.recording_reporter import RecordingReporter
from service.compilation import climber_process, entry, forks, job, plans
from service.compilation.activity import Activity
from service.compilation.climber_process import Climbed
from service.compilation.climbers import climb_apart
from service.compilation.forks import Forks, Seat
from service.compilation.host_fault import HostFaultError
from service.compilation.ladder import climb
from service.compilation.prepare import Prepared
from service.compilation.program import Parts, Program, Step
from service.compilation.report.rows import rung_row
from service.compilation.run import exchange
from service.compilation.run.baseline import FirstRun
from service.compilation.run.observation import RungCase
from service.compilation.rungs import LADDER
from service.compilation.time_share import ENDLESS, TimeShare
from service.jobs.files import DataLayout
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.compile import CompileSpec, Phase
from service.parallel.boundary import StepBoundary
from workers.forks import threads

LOW = LADDER[:2]
PHASES: tuple[Phase, Phase] = ("train", "inference")
EACH_PHASE: plans.Plan = tuple(tuple(RungCase(rung, phase) for rung in LOW) for phase in PHASES)
WHOLE: plans.Plan = (tuple(case for part in EACH_PHASE for case in part),)


@pytest.fixture(autouse=True)
def _process_that_can_be_forked() -> None:
    if any(name.startswith("pt_autograd") for name in threads()):  # where PyTorch is built for CUDA, after a backward
        pytest.skip("a backward ran in this process before, so it cannot be forked; this file passes by itself")


def is_compiled(parts: Parts) -> bool:
    return any(module._compiled_call_impl is not None for part in parts.modules.values() for module in part.modules())


@dataclass(frozen=True)
class Ending:
    """A sound program that ends its process in a phase, by a signal, where it is ``compiled`` or where it is not."""

    phase: Phase
    number: int
    compiled: bool = True
    device: torch.device = clean.PERCEPTRON.device
    period: int = clean.PERCEPTRON.period

    def build(self, dtype: torch.dtype) -> Parts:
        return clean.PERCEPTRON.build(dtype)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        self._end("train", parts)
        yield from clean.PERCEPTRON.train(parts, boundary)

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        self._end("inference", parts)
        yield from clean.PERCEPTRON.inference(parts, boundary)

    def _end(self, phase: Phase, parts: Parts) -> None:
        if phase == self.phase and is_compiled(parts) == self.compiled:
            faulthandler.disable()  # its stacks are no news here
            os.kill(os.getpid(), self.number)


def prepared(program: Program = clean.PERCEPTRON) -> Callable[[], Prepared]:
    return lambda: Prepared(program, quick_plan(program, 4), os.getpid())


def climbed(
    prepare: Callable[[], Prepared],
    planned: plans.Plan,
    *coarser: plans.Plan,
    stop: bool = False,
    share: TimeShare = ENDLESS,
) -> tuple[list[Climbed], list[int]]:
    """Return what came of the processes, and those that were ready."""
    told: list[tuple[int, None]] = []

    def serve(seat: Seat) -> None:
        seat.tasks.recv().climb(prepare, seat)

    processes = Forks.ready(serve, len(planned), 2)
    try:
        activity = Activity(RecordingReporter(), 1)
        return list(
            climb_apart(processes, [planned, *coarser], lambda: stop, told.append, watcher=activity, share=share)
        ), [process for process, _ in told]
    finally:
        processes.end()


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


@dataclass(frozen=True)
class Telling(Ending):
    """A sound program that notes the processes in which it runs."""

    file: Path = Path(os.devnull)

    def _end(self, phase: Phase, parts: Parts) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.parametrize(("number", "processes"), [(0, 4), (1, 2), (2, 1)])
def test_the_first_process_chooses_how_many_climb(
    number: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climber_process, "choose_plan", lambda plans, size, room: number)
    program = Telling("train", 0, file=tmp_path / "processes")
    each_rung = tuple((case,) for part in EACH_PHASE for case in part)
    found, _ = climbed(prepared(program), each_rung, EACH_PHASE, WHOLE)
    assert [each.result.verdict for each in found] == ["pass"] * 4
    assert len(set(program.file.read_text().split())) == processes


@dataclass(frozen=True)
class InDoublePrecision(Ending):
    """A sound program that notes where it runs in float64; the first such process ends if it is to."""

    file: Path = Path(os.devnull)
    ends: bool = False

    def build(self, dtype: torch.dtype) -> Parts:
        if dtype == torch.float64:
            is_first = not self.file.exists()
            with self.file.open("a") as file:
                file.write(f"{os.getpid()}\n")
            if is_first and self.ends:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().build(dtype)


@pytest.mark.parametrize("ends", [False, True])
def test_one_process_of_a_phase_makes_the_baseline_and_if_it_ends_another(ends: bool, tmp_path: Path) -> None:
    program = InDoublePrecision("train", 0, file=tmp_path / "processes", ends=ends)
    each_rung = tuple((case,) for case in EACH_PHASE[0])
    found, _ = climbed(prepared(program), each_rung)
    assert [each.result.verdict for each in found] == ["pass"] * 2
    assert len(program.file.read_text().split()) == 1 + ends
    parities = [rung_row(each.result)["parity"]["judged_by"] for each in found]
    assert parities == ["float64"] * 2


def test_a_process_of_inference_then_takes_a_rung_of_training_and_the_baseline_of_another(tmp_path: Path) -> None:
    program = InDoublePrecision("train", 0, file=tmp_path / "processes")
    train, inference = EACH_PHASE
    found, _ = climbed(prepared(program), (train[:1], (*inference, *train[1:])), (*EACH_PHASE,), WHOLE)
    verdicts = {each.result.case: each.result.verdict for each in found}
    assert verdicts == dict.fromkeys(WHOLE[0], "pass")
    assert len(set(program.file.read_text().split())) == len(program.file.read_text().split()) == 2


@dataclass(frozen=True)
class NotingOrder(Telling):
    """A sound program that notes its compiled steps too, and where it is built in float64."""

    def build(self, dtype: torch.dtype) -> Parts:
        if dtype == torch.float64:
            self._note("float64")
        return super().build(dtype)

    def _end(self, phase: Phase, parts: Parts) -> None:
        self._note("compiled" if is_compiled(parts) else "eager")

    def _note(self, what: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} {what}\n")


def orders(file: Path) -> list[list[str]]:
    """Return what each process noted, each word once."""
    found: dict[str, dict[str, None]] = {}
    for line in file.read_text().splitlines():
        process, what = line.split()
        found.setdefault(process, {})[what] = None
    return sorted(map(list, found.values()))


@dataclass(frozen=True)
class WithMomentum(NotingOrder):
    """Its optimizer holds more after a step than before."""

    def build(self, dtype: torch.dtype) -> Parts:
        parts = super().build(dtype)
        held = [each for module in parts.modules.values() for each in module.parameters()]
        return replace(parts, optimizers=(torch.optim.SGD(held, lr=0.01, momentum=0.9),))


@dataclass(frozen=True)
class OtherwiseInEachProcess(NotingOrder):
    """It begins with other weights in each process, which no program may."""

    def build(self, dtype: torch.dtype) -> Parts:
        parts = super().build(dtype)
        with torch.no_grad():
            for module in parts.modules.values():
                for each in module.parameters():
                    each.mul_(1 + os.getpid() / 2**20)
        return parts


BY_ONE = [["eager", "compiled"], ["eager", "float64", "compiled"]]
BY_EACH = [["eager", "compiled", "float64"], ["eager", "float64", "compiled"]]


@pytest.mark.parametrize(
    ("program", "expected"),
    [(NotingOrder, BY_ONE), (WithMomentum, BY_EACH), (OtherwiseInEachProcess, BY_EACH)],
    ids=["states that each can make", "states that it cannot", "other states"],
)
def test_one_process_makes_the_baseline_of_a_large_program_whose_states_each_can_make(
    program: type[NotingOrder], expected: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climber_process, "SMALL", 0)
    file = tmp_path / "steps"
    found, _ = climbed(prepared(program("train", 0, file=file)), tuple((case,) for case in EACH_PHASE[0]))
    assert [each.result.verdict for each in found] == ["pass"] * 2
    assert [rung_row(each.result)["parity"]["judged_by"] for each in found] == ["float64"] * 2
    assert orders(file) == expected


def test_a_baseline_of_a_first_run_that_could_not_be_handed_on_is_no_other_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exchange._write

    def refuse_first_runs(file: int, result: tuple[Any, ...]) -> None:
        write(file, () if isinstance(result[0], FirstRun) else result)

    monkeypatch.setattr(exchange, "_write", refuse_first_runs)
    program = InDoublePrecision("train", 0, file=tmp_path / "processes")
    found, _ = climbed(prepared(program), tuple((case,) for case in EACH_PHASE[0]))
    assert [each.result.verdict for each in found] == ["pass"] * 2
    assert len(set(program.file.read_text().split())) == 2


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
