"""Runs one verify job without a service: a rank of its own in a folder that is gone afterwards.

It is the program of every rank, so bounds, searches and checks are those of a job. This process takes the place of
its supervisor: it listens to the rank, reads the row from the rank's file, and ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from service.jobs import rendezvous_folder
from service.jobs.event_files import rank_file
from service.jobs.layout import DataLayout
from service.jobs.runtime import GATE_ARTIFACTS
from trivet.errors import TrivetError

JOB = "job_alone"
_POLL_S = 0.01


class RankError(TrivetError):
    """The rank ended without a row; the message is its own error."""


@dataclass(frozen=True)
class LoneRank:
    """The files of a job without a service, and the rank that runs it."""

    scratch: Path
    said: list[str] = field(default_factory=list)
    """What the rank has said so far to its supervisor: the last word is its error."""

    @property
    def data(self) -> DataLayout:
        return DataLayout(self.scratch / "data")

    def upload(self, file: Path) -> str:
        """Keep a file for the spec; return its id."""
        content = file.read_bytes()
        name = f"file_{sha256(content).hexdigest()}"
        path = self.data.file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return name

    def row(self, spec: Mapping[str, Any], deadline: float) -> Mapping[str, Any] | None:
        """Return the row of the spec's one instance; ``None`` at the deadline (``time.monotonic``). Raises
        :class:`RankError`.
        """
        paths = self.data.job(JOB)
        for folder in (paths.work(1), paths.artifacts, paths.checkpoints):
            folder.mkdir(parents=True)
        (paths.attempt(1) / GATE_ARTIFACTS).write_text("{}")
        (paths.attempt(1) / "spec.json").write_text(json.dumps(spec))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._events))
            listening.listen(8)
            threading.Thread(target=_hear, args=(listening, self.said), daemon=True).start()
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.rank"],
                env=self._environment(spec["device"]),
                cwd=paths.work(1),
                stdin=subprocess.DEVNULL,
            )
            try:
                return self._awaited(process, rank_file(paths.attempt(1), 0), deadline)
            finally:
                process.kill()
                process.wait()

    def _awaited(self, process: subprocess.Popen[bytes], events: Path, deadline: float) -> Mapping[str, Any] | None:
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            if (row := next((each for each in _written(events) if each.get("type") == "bound"), None)) is not None:
                return row
            if ended:
                raise RankError(_error("".join(self.said), process.returncode))
            time.sleep(_POLL_S)
        return None

    @property
    def _events(self) -> Path:
        return self.scratch / "events"

    def _environment(self, device: str) -> dict[str, str]:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        return {
            **os.environ,
            **alone,
            "PYTHONSAFEPATH": "1",
            "TRIVET_JOB": JOB,
            "TRIVET_ATTEMPT": "1",
            "TRIVET_DATA": str(self.data.root),
            "TRIVET_EVENTS": str(self._events),
            "TRIVET_EVENTS_SECRET": "",
            "TRIVET_DEVICE": device,
            rendezvous_folder.VARIABLE: str(rendezvous_folder.make(self.scratch / "rendezvous")),
        }


@contextmanager
def lone_rank() -> Iterator[LoneRank]:
    """Yield the room of a rank, which is gone with the block."""
    with tempfile.TemporaryDirectory(prefix="trivet-") as scratch:
        yield LoneRank(Path(scratch))


def _written(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that are complete in a rank's file by now."""
    if path.exists():
        yield from (json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))


def _error(said: str, code: int) -> str:
    """Return the rank's own error, if it told one."""
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            word = json.loads(line)
            if isinstance(word, dict) and word.get("type") == "error":
                return f"{word.get('error')}: {word.get('message')}"
    return f"the rank ended with exit code {code}: {said[-2000:]}"


def _hear(listening: socket.socket, said: list[str]) -> None:
    """Take the rank's connections, and keep what it says."""
    with contextlib.suppress(OSError):
        while True:
            peer, _ = listening.accept()
            threading.Thread(target=_keep, args=(peer, said), daemon=True).start()


def _keep(peer: socket.socket, said: list[str]) -> None:
    with contextlib.suppress(OSError), peer, peer.makefile(encoding="utf-8", errors="replace") as lines:
        said.extend(lines)
