"""Runs one verify job without a service: a rank of its own in a folder that is gone afterwards.

It is the program of every rank, so bounds, searches and checks are those of a job. This process takes the place of
its supervisor: it listens to the rank, reads the row from the rank's file, and ends it. Traces of networks stay in the
user's cache (``~/.cache/trivet``): a trace takes as long as the import of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from service.jobs.events import rank_file
from service.jobs.files import DataLayout, trim
from service.jobs.runtime import GATE_ARTIFACTS, HOST_CACHE, SPEC, rendezvous_folder
from trivet.errors import TrivetError

JOB = "job_alone"
_POLL_S = 0.01
_LARGEST_CACHE = 1 << 30
"""Bytes of traces that are kept."""


class RankError(TrivetError):
    """The rank ended without a row; the message is its own error."""


@dataclass(frozen=True)
class LoneRank:
    """The files of a job without a service, and the rank that runs it; ``variables`` are its own."""

    scratch: Path
    variables: Mapping[str, str]

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
        (paths.attempt(1) / SPEC).write_text(json.dumps(spec))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._events))
            listening.listen(8)
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.rank"],
                env=self._environment(spec["device"]),
                cwd=paths.work(1),
                stdin=subprocess.DEVNULL,
            )
            with closing(_Ear(listening)) as ear:
                try:
                    return _await_result(process, ear, rank_file(paths.attempt(1), 0), deadline)
                finally:
                    process.kill()
                    process.wait()

    @property
    def _events(self) -> Path:
        return self.scratch / "events"

    def _environment(self, device: str) -> dict[str, str]:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivet"
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        trim(kept, _LARGEST_CACHE)
        return {
            **os.environ,
            **alone,
            **self.variables,
            HOST_CACHE: str(kept),
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
def lone_rank(variables: Mapping[str, str]) -> Iterator[LoneRank]:
    """Yield the room of a rank, which is gone with the block."""
    with tempfile.TemporaryDirectory(prefix="trivet-") as scratch:
        yield LoneRank(Path(scratch), variables)


def _await_result(
    process: subprocess.Popen[bytes], ear: _Ear, events: Path, deadline: float
) -> Mapping[str, Any] | None:
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if (row := next((each for each in _read_events(events) if each.get("type") == "bound"), None)) is not None:
            return row
        if ended:
            raise RankError(ear.error(process.returncode))
        ear.hear(_POLL_S)
    return None


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that are complete in a rank's file by now."""
    if path.exists():
        yield from (json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))


class _Ear:
    """Takes a rank's connections to its supervisor, and keeps what it says there."""

    def __init__(self, listening: socket.socket) -> None:
        self._selector, self._said = selectors.DefaultSelector(), bytearray()
        self._selector.register(listening, selectors.EVENT_READ, listening.accept)

    def hear(self, within_s: float) -> bool:
        """Take what has come, or comes within this time; return whether it was anything."""
        ready = self._selector.select(within_s)
        for key, _ in ready:
            if key.data is not None:
                self._selector.register(key.data()[0], selectors.EVENT_READ)
            elif text := _receive(key.fileobj):
                self._said += text
            else:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is None and isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def error(self, code: int) -> str:
        """Return the error of a rank that has ended, by its own word if it told one."""
        while self.hear(0):
            pass
        said = self._said.decode(errors="replace")
        for line in said.splitlines():
            with contextlib.suppress(ValueError):
                word = json.loads(line)
                if isinstance(word, dict) and word.get("type") == "error":
                    return f"{word.get('error')}: {word.get('message')}"
        return f"the rank ended with exit code {code}: {said[-2000:]}"


def _receive(peer: Any) -> bytes:
    try:
        return bytes(peer.recv(1 << 16))
    except ConnectionError:
        return b""
