"""The shell blocks of the README and of guides run, beside a service that has what they name."""

from __future__ import annotations

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

from trivet import Client

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("projects", "queue", "security", "sweeps")),
    *(ROOT / "docs" / "guides" / f"{name}.md" for name in ("jobs", "train", "verify")),
]
ELSEWHERE = ("make ", "examples/compile.yaml", "acasxu")
"""Parts of commands that are left out: what this run is a part of, compile checks of minutes (see `tests/e2e`), and a
benchmark that is not here.
"""

pytestmark = pytest.mark.slow(12)


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
    folder = tmp_path_factory.mktemp("reader")
    data = tmp_path_factory.mktemp("service") / "data"
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "words.txt").write_text("some words")
    subprocess.run([sys.executable, "examples/own_network.py"], cwd=folder, check=True, capture_output=True)
    with up(data, TRIVET_CPU_SLOTS="4", TRIVET_WARM_SUPERVISORS="1") as process:
        url = address(process, data)
        with Client(url, (data / "admin.key").read_text().strip()) as client:
            named = prepared(client, folder)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield Beside({**os.environ, "PATH": path, "TRIVET_DATA": str(data), "OMP_NUM_THREADS": "1"}, folder, named)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, beside: Beside) -> None:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    tried = [command for command in commands if not any(part in command for part in ELSEWHERE)]
    assert tried
    for command in map(beside.meant, tried):
        assert "…" not in command, "what that stands for is to be said here"
        words = ["bash", "-c", command]
        ran = subprocess.run(
            words, cwd=beside.folder, env=beside.environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
