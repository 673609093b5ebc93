"""A compile report in a terminal: the summary first, and a ladder that fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from trivet.cli import results
from trivet.terminal import Terminal

PASSED = {
    "verdict": "pass", "step_ms": 2.4567, "eager_step_ms": 1.612, "ratio": 1.524, "noisy": False, "graph_breaks": [],
    "recompiles": [],
}  # fmt: skip
UNTRIED = {"verdict": "not_applicable", "step_ms": None, "ratio": None, "graph_breaks": None, "recompiles": None}
LADDER = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")


def printed(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    @contextmanager
    def client() -> Iterator[Any]:
        yield SimpleNamespace(report=lambda job_id: report)

    monkeypatch.setattr(results, "client", client)
    monkeypatch.setattr(results, "out", Terminal(width=80))
    results.report("job_x")
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_summary_comes_first_and_every_rung_has_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = [{"phase": phase, "rung": name, **PASSED} for phase in ("train", "inference") for name in LADDER]
    rungs.append({"phase": "inference", "rung": "reduce-overhead", **UNTRIED})
    report = {"summary": ["Training may."], "gate": {"train": "inductor", "inference": None}, "rungs": rungs}
    lines = printed(report, monkeypatch, capsys)
    assert lines[:3] == ["Training may.", "gate: train inductor, inference nothing", ""]
    assert lines[3].split() == ["phase", "rung", "verdict", "step", "ms", "eager", "vs", "eager"]
    assert [line.split()[:2] for line in lines[4:]] == [[each["phase"], each["rung"]] for each in rungs]
    assert lines[4].split()[1:4] == ["eager", "(Dynamo)", "pass"]
    assert lines[6].split() == ["train", "aot_eager_decomp_partition", "pass", "2.46", "1.61", "1.52×"]
    assert lines[-1].endswith("not applicable")


def test_what_was_found_somewhere_has_a_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"phase": "train", "rung": "eager", **PASSED, "graph_breaks": [{"reason": "print"}]}
    lines = printed({"rungs": [broken, {"phase": "train", "rung": "x", **UNTRIED}]}, monkeypatch, capsys)
    assert "graph breaks" in lines[2]
    assert "recompiles" not in lines[2]
    assert lines[3].split()[-1] == "1"


def test_each_row_tells_of_its_own_noise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rungs = [
        {"phase": "train", "rung": "eager", **PASSED},
        {"phase": "train", "rung": "x", **PASSED, "noisy": True},
    ]
    lines = printed({"gate": {"train": "eager", "inference": None}, "rungs": rungs}, monkeypatch, capsys)
    assert lines[0] == "gate: train eager (Dynamo), inference nothing"
    assert [line.split()[-1] for line in lines[-3:-1]] == ["1.52×", "≈1.52×"]
    assert lines[-1] == "≈ the timing of this rung was noisy"


def test_a_ratio_that_the_steps_beside_it_contradict_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The medians of both may come from different rounds."""
    fair = {"phase": "train", "rung": "eager", **PASSED}
    odd = {**fair, "step_ms": 65.1, "eager_step_ms": 116.0, "ratio": 0.41}
    assert "rounds" not in " ".join(printed({"rungs": [fair]}, monkeypatch, capsys))
    assert "the median over rounds in which both run in turns" in " ".join(
        printed({"rungs": [fair, odd]}, monkeypatch, capsys)
    )
