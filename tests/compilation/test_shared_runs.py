"""Uncompiled runs that one process of a phase makes for all, and how many processes climb."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from climbing import EACH_PHASE, WHOLE, Ending, climbed, is_compiled, prepared, skip_unless_it_can_fork

from service.compilation import climber_process
from service.compilation.program import Parts
from service.compilation.report.rows import rung_row
from service.compilation.run import exchange
from service.compilation.run.baseline import FirstRun
from service.jobs.spec.compile import Phase


@pytest.fixture(autouse=True)
def _forkable() -> None:
    skip_unless_it_can_fork()


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
