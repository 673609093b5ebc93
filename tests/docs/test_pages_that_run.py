"""What pages show works: the commands of the README, guides and tutorials, and the notebooks, beside one service.

All are in this file so that they share the service, which takes longer to start than most pages take.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_service import address, up
from pages import ROOT, commands, console_blocks

from trivet import Client

USE = ("debugging", "from-your-script", "jobs", "queue", "sweeps", "train", "verify")
GUIDES = [
    ROOT / "README.md",
    *(ROOT / "docs" / "use" / f"{name}.md" for name in USE),
    *(ROOT / "docs" / "run" / f"{name}.md" for name in ("projects", "security")),
]
TUTORIALS = [ROOT / "docs" / "learn" / f"{name}.md" for name in ("certify-your-network", "first-hour", "own-data")]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SHOWN = {"train-compare-certify": ("<svg", "'verified'"), "live-module": ("'verified'", "{'train': 'aot_eager', ")}
"""What a notebook prints when it is executed."""
ELSEWHERE = ("make ", "submit examples/train.yaml", "examples/compile.yaml", "acasxu")
"""Parts of commands of guides that are left out: what this run is a part of, the training that the first tutorial
begins with, compile checks of minutes (see `tests/e2e`), and a benchmark that is not here.
"""


@dataclass(frozen=True)
class Beside:
    """A terminal beside a service, and what commands of the pages name by ``job_…`` and ``file_…``."""

    environment: dict[str, str]
    folder: Path
    named: dict[str, str]

    def meant(self, command: str) -> str:
        """Return a command with the ids that its reader would have at that place."""
        for shown, given in self.named.items():
            command = command.replace(shown, given)
        return command


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """A ``trivet up`` with four places for ranks, whose job ``JOB`` has ended."""
    folder = tmp_path_factory.mktemp("reader")
    data = tmp_path_factory.mktemp("service") / "data"
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "words.txt").write_text("some words")
    with up(data, TRIVET_CPU_SLOTS="4", TRIVET_WARM_SUPERVISORS="1") as process:
        url = address(process, data)
        with Client(url, (data / "admin.key").read_text().strip()) as client:
            named = prepared(client, folder)
        outer = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        outer["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"TRIVET_DATA": str(data), "OMP_NUM_THREADS": "1", "JOB": named["bounds job_…"].split()[1]}
        yield Beside(outer | own, folder, named)
        process.send_signal(signal.SIGTERM)
        process.wait(300)


def prepared(client: Client, folder: Path) -> dict[str, str]:
    """Make what the pages take for granted; return it by how they show it."""
    model = {"family": "mlp", "in_features": 64, "hidden": [32], "out_features": 10}
    trained = client.submit({"kind": "train", "model": model, "data": {"source": "digits"}, "steps": 40}).id
    asked = {"robustness": {"data": {"source": "digits"}, "count": 4, "eps": 0.01}}
    checked = client.submit({"kind": "verify", "model": {"job": trained}, "property": asked, "method": "ibp"}).id
    assert [job.state for job in client.wait_many([trained, checked])] == ["succeeded", "succeeded"]
    client.projects.create("language")
    words = client.upload(folder / "words.txt").id
    return {
        "model.job=job_…": f"model.job={trained}",
        "share job_…": f"share {trained}",
        "bounds job_…": f"bounds {checked}",
        "delete file_…": f"delete {words}",
    }


@pytest.mark.slow(12)
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, beside: Beside) -> None:
    tried = [command for command in commands(page) if not any(part in command for part in ELSEWHERE)]
    assert tried
    for command in dict.fromkeys(map(beside.meant, tried)):
        assert "…" not in command, "what that stands for is to be said here"
        words = ["bash", "-c", command]
        ran = subprocess.run(
            words, cwd=beside.folder, env=beside.environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
        assert ran.stdout or page.stem != "debugging", f"{command} says nothing"


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Each command of a page's console blocks, with the lines that the page shows of what it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in console_blocks(page):
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


@pytest.mark.slow(40)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_does_what_it_shows(path: Path, beside: Beside, tmp_path: Path) -> None:
    """One shell runs all commands, so that later ones have the variables of earlier ones."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    told = steps(path.read_text())
    script = [f"{{ {command}\n}} > {index}.out 2>&1; echo $? > {index}.rc" for index, (command, _) in enumerate(told)]
    subprocess.run(
        ["bash"],
        input="\n".join(script),
        cwd=tmp_path,
        env=beside.environment,
        text=True,
        check=True,
        capture_output=True,
    )
    for index, (command, shown) in enumerate(told):
        printed = (tmp_path / f"{index}.out").read_text()
        refused = bool(shown) and shown[0].startswith("refused:")
        assert ((tmp_path / f"{index}.rc").read_text() != "0\n") == refused, f"{command}\n{printed}"
        assert missing(shown, printed) == [], f"{command}\n{printed}"


def test_a_line_that_was_not_printed_is_found() -> None:
    printed = "instance  verdict\n0         verified   16.2\n"
    assert missing(["instance verdict", "…", "0  verified  15.93"], printed) == []
    assert missing(["0         falsified   16.2"], printed) == ["0         falsified   16.2"]
    assert missing(["0  verified  16.2", "instance  verdict"], printed) == ["instance  verdict"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


@pytest.mark.slow(30)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_does_what_it_shows(
    path: Path, beside: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell is executed by a kernel, beside a service, as a reader would."""
    import nbformat
    from nbclient import NotebookClient

    for name in [name for name in os.environ if name.startswith("TRIVET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRIVET_DATA", beside.environment["TRIVET_DATA"])
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "\n".join(str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert all(shown in printed for shown in SHOWN[path.stem])
