"""The tutorials are true: their commands run on a service, and print what the pages show."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_service import address, up

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Each command of a page's console blocks, with the lines that the page shows of what it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.startswith("> "):
                command, shown = found.pop()
                found.append((f"{command}\n{line[2:]}", shown))
            else:
                found[-1][1].append(line)
    return found


def pattern(line: str) -> str:
    """Return a line without what differs between runs: numbers, ids, hashes, and how columns are padded."""
    line = re.sub(r"\b[0-9a-f]{16}\b", "HASH", re.sub(r"(job|file)_\w+…?", r"\1_ID", line))
    return re.sub(r"\s+", " ", re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "#", line)).strip()


def missing(shown: list[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed in this order; ``…`` stands for lines that are left out."""
    rest = iter([pattern(line) for line in printed.splitlines()])
    return [line for line in shown if line != "…" and pattern(line) not in rest]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a terminal beside a ``trivet up`` with four places for ranks."""
    data = tmp_path_factory.mktemp("service") / "data"
    with up(data, TRIVET_CPU_SLOTS="4", TRIVET_WARM_SUPERVISORS="1") as process:
        address(process, data)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        outer = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        yield {**outer, "PATH": path, "TRIVET_DATA": str(data), "OMP_NUM_THREADS": "1"}
        process.send_signal(signal.SIGTERM)
        process.wait(300)


@pytest.mark.slow(40)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_does_what_it_shows(path: Path, service: dict[str, str], tmp_path: Path) -> None:
    """One shell runs all commands, so that later ones have the variables of earlier ones."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = steps(path.read_text())
    script = [
        f"{{ {command}\n}} > {index}.out 2>&1; echo $? > {index}.rc" for index, (command, _) in enumerate(commands)
    ]
    subprocess.run(
        ["bash"], input="\n".join(script), cwd=tmp_path, env=service, text=True, check=True, capture_output=True
    )
    for index, (command, shown) in enumerate(commands):
        printed = (tmp_path / f"{index}.out").read_text()
        refused = bool(shown) and shown[0].startswith("refused:")
        assert ((tmp_path / f"{index}.rc").read_text() != "0\n") == refused, f"{command}\n{printed}"
        assert missing(shown, printed) == [], f"{command}\n{printed}"


def test_a_line_that_was_not_printed_is_found() -> None:
    printed = "instance  verdict\n0         verified   16.2\n"
    assert missing(["instance verdict", "…", "0  verified  15.93"], printed) == []
    assert missing(["0         falsified   16.2"], printed) == ["0         falsified   16.2"]
    assert missing(["0  verified  16.2", "instance  verdict"], printed) == ["instance  verdict"]
