"""The table of faults has every cell, and each test that it names is there."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "run" / "reliability.md").read_text()
PROCESSES = ("API", "agent", "supervisor", "keeper", "launcher", "rank", "broker", "host")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "network", "disk", "clock")
STATES = ("queued", "starting", "running", "finishing")


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of every table with this first line."""
    tables = re.findall(rf"^\| {re.escape(heading)} \|\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for table in tables for line in table.splitlines()]


def test_no_cell_is_missing() -> None:
    found = rows(" | ".join(("process", "fault", *STATES)))
    assert [tuple(row[:2]) for row in found] == list(itertools.product(PROCESSES, FAULTS)) * 2
    assert [row for row in found if len(row) != 6 or not all(row)] == []


def test_every_cell_names_a_test_or_a_reason() -> None:
    cells = {
        word for row in rows(" | ".join(("process", "fault", *STATES))) for cell in row[2:] for word in cell.split()
    }
    tests, reasons = dict(rows("| test")), dict(rows("| reason"))
    assert all(reasons.values())
    in_reasons = set(re.findall(r"\b[A-Z]\d\b", " ".join(reasons.values())))
    assert cells | in_reasons == tests.keys() | reasons.keys()


def test_every_test_that_is_named_exists() -> None:
    named = [re.fullmatch(r"`([\w/.]+)::(\w+)`", name) for _, name in rows("| test")]
    assert named
    missing = []
    for match in named:
        assert match is not None
        path, function = match.groups()
        defined = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
        if function not in defined:
            missing.append(match[0])
    assert missing == []
