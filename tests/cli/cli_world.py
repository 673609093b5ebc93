"""The command as users run it, and a service for it to talk to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_server import CommandServer
from digits import digits_job
from pydantic import SecretStr
from served_app import served
from waiting import eventually

from api.main import create_app
from service.jobs.records import AttemptRef, JobError, PartOutcome
from service.jobs.settings import Settings
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import LEASES

TRAIN = digits_job(16, 16, name="mine", steps=10)


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Cli:
    """Runs ``trivet`` in a folder of its own against one service."""

    folder: Path
    variables: dict[str, str]
    server: CommandServer

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command as a user does, to be talked to while it runs."""
        return subprocess.Popen(
            [sys.executable, "-m", "trivet", *words],
            env=self._environment({}),
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, stdin: str = "", **changes: str | None) -> Ran:
        """``changes`` are variables of its environment; ``None`` takes one away."""
        with tempfile.TemporaryDirectory() as folder:
            given, out, err = (Path(folder, name) for name in ("in", "out", "err"))
            given.write_text(stdin)
            code = self.server.run(
                words=words,
                environment=self._environment(changes),
                folder=str(self.folder),
                files=[str(given), str(out), str(err)],
            )
            ran = Ran(code, out.read_text(), err.read_text())
        assert "Traceback" not in ran.err, ran.err
        return ran

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        changed = {**outer, **self.variables, "COLUMNS": "200", **changes}
        return {name: value for name, value in changed.items() if value is not None}

    def ok(self, *words: str, stdin: str = "") -> Ran:
        ran = self(*words, stdin=stdin)
        assert ran.code == 0, ran.err
        return ran

    def spec(self, **changes: Any) -> str:
        """A spec file; its path."""
        path = self.folder / "spec.json"
        path.write_text(json.dumps({**TRAIN, **changes}))
        return str(path)


@dataclass(frozen=True)
class Worker:
    """Stands in for a host."""

    store: Store

    def start(self, job_id: str) -> AttemptRef:
        self.store.hosts.beat(HostReport("fake", "127.0.0.1", (), 4, {"torch": "2.13.0"}, threads={"cpu": 2}))
        self.store.attempts.place()
        ref = AttemptRef(job_id, self.store.jobs.get(job_id).attempt, "fake")
        self.store.attempts.claim(ref, "supervisor")
        return ref

    def never_claim(self, job_ids: Sequence[str]) -> None:
        """Jobs are placed on the host, and nobody there starts them in time."""
        self.store.hosts.beat(HostReport("fake", "127.0.0.1", (), 4, {"torch": "2.13.0"}, threads={"cpu": 2}))
        self.store.attempts.place()
        for job_id in job_ids:
            self.store.client.call("ZADD", LEASES(), 1, f"{job_id}:1:fake")
        self.store.attempts.reap()

    def emit(self, ref: AttemptRef, events: Sequence[dict[str, Any]]) -> None:
        self.store.attempts.emit(ref, [{"time": time.time(), "rank": 0, **event} for event in events])  # type: ignore[typeddict-item]

    def end(self, ref: AttemptRef, error: str | None = None, *, final: bool = False, **result: Any) -> None:
        failure = None if error is None else JobError(type="ValueError", message=error, final=final)
        self.store.attempts.finish(ref, PartOutcome("failed" if error else "succeeded", result=result, error=failure))

    def run_next(self, act: Callable[[AttemptRef], None]) -> threading.Thread:
        """Runs the next job that is queued, as soon as it is there."""

        def work() -> None:
            act(self.start(eventually(lambda: self.store.jobs.list().items)[0].id))

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@contextmanager
def serving(settings: Settings, store: Store, port: int = 0) -> Iterator[str]:
    """A real server; its address."""
    with served(create_app(settings, store), port) as (url, _):
        yield url


def settings_for(broker: str, data: Path) -> Settings:
    return Settings(data=data, redis_url=SecretStr(broker))
