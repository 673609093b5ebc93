"""What commands print where there is no terminal: in files, in pipes, in the log of a scheduled run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from cli_world import Cli

from trivet.cli.progress import PLAIN_S, show, show_plainly
from trivet.terminal import Terminal

NAME = "a long name that holds more words than eighty columns have room for beside all the others"


def test_rows_of_a_table_are_one_line_each(trivet: Cli) -> None:
    ids = [trivet.ok("submit", trivet.spec(name=f"{NAME} {index}")).out.strip() for index in (1, 2)]
    listed = trivet("jobs", COLUMNS=None).out.splitlines()
    assert [line.split()[0] for line in listed] == ["id", *reversed(ids)]
    assert f"{NAME} 2" in listed[1]
    assert max(map(len, listed)) < 250
    refused = trivet("submit", trivet.spec(device=NAME), COLUMNS=None)
    assert f'  got "{NAME}"' in refused.err.splitlines()
    fitted = trivet("submit", trivet.spec(device=NAME), COLUMNS="80").err
    assert max(map(len, fitted.splitlines())) <= 80
    assert NAME in " ".join(fitted.split())


def test_columns_bounds_a_table_all_the_same(trivet: Cli) -> None:
    trivet.ok("submit", trivet.spec(name=NAME))
    assert max(map(len, trivet("jobs", COLUMNS="100").out.splitlines())) <= 100


def plainly(kind: str, told: Iterable[dict[str, Any] | float]) -> str:
    """What is printed of a job's events; a number among them is the seconds that pass."""
    now, written = 0.0, io.StringIO()

    def events() -> Iterator[dict[str, Any]]:
        nonlocal now
        for each in told:
            if isinstance(each, float):
                now += each
            else:
                yield {"job": "j", **each}

    show_plainly(Terminal(file=written, width=200), {"j": kind}, events(), clock=lambda: now)
    return written.getvalue()


def test_progress_is_told_every_few_seconds() -> None:
    def events() -> Any:
        yield {"type": "state", "state": "running", "reason": None}
        for step in range(1, 41):
            yield PLAIN_S / 10
            yield {"type": "progress", "done": step, "total": 40, "unit": "steps"}
            yield {"type": "metric", "step": step, "values": {"loss": 1 / step if step < 39 else None}}
        yield {"type": "state", "state": "succeeded", "reason": None}

    assert plainly("train", events()).splitlines() == [
        "train: running",
        "train: 10/40 steps  loss 0.1111",
        "train: 20/40 steps  loss 0.05263",
        "train: 30/40 steps  loss 0.03448",
        "train: 40/40 steps  loss nan",
        "train: succeeded",
    ]


def test_progress_within_an_instance_is_told_with_the_time_left() -> None:
    def events() -> Any:
        finer = {"phase": "bounding hidden layers", "share": 0.25, "left_s": 600.0}
        for more in (finer, {"done": 8}):
            yield 2 * PLAIN_S
            yield {"type": "progress", "done": 0, "total": 8, "unit": "instances", **more}

    assert plainly("verify", events()).splitlines() == [
        "verify: 0/8 instances  bounding hidden layers, 25%, about 10 min left",
        "verify: 8/8 instances",
    ]


def test_what_comes_before_the_work_is_told() -> None:
    def events() -> Any:
        for name in ("importing", "loading", "working", "ending"):
            yield 2 * PLAIN_S
            yield {"type": "phase", "name": name}

    assert plainly("train", events()).splitlines() == ["train: importing", "train: loading", "train: ending"]


def test_the_rungs_of_a_compile_job_are_told() -> None:
    def events() -> Any:
        yield {"type": "progress", "done": 0, "total": 3, "unit": "rungs"}
        for done, (rung, passed) in enumerate((("eager", 1.0), ("inductor", 0.0)), start=1):
            yield 2 * PLAIN_S
            yield {
                "type": "metric",
                "step": done,
                "values": {f"train/{rung}/passed": passed, f"train/{rung}/graphs": 1.0},
            }
            yield {"type": "progress", "done": done, "total": 3, "unit": "rungs"}

    told = plainly("compile", events())
    assert "1/3 rungs  train/eager passed\n" in told
    assert told.endswith("2/3 rungs  train/inductor did not pass\n")


@pytest.mark.parametrize("width", [80, 200])
def test_state_amount_and_numbers_are_on_a_terminal_of_any_width(width: int) -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=width)
    console._force_terminal = True  # the file is none
    told: list[dict[str, Any]] = [
        {"type": "state", "state": "running"},
        {"type": "progress", "done": 120, "total": 2000, "unit": "steps"},
        {"type": "metric", "step": 120, "values": {"loss": 0.25, "eval_accuracy": 0.5}},
        {"type": "state", "state": "succeeded"},
    ]
    show(console, {"one": "train the classifier of handwritten digits"}, [{"job": "one", **each} for each in told])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert any("succeeded" in line and "120/2000" in line for line in lines)
    assert any("loss 0.25" in line and "eval_accuracy 0.5" in line for line in lines)
