"""Makes a run of a job on a server of Weights & Biases, or offline, by W&B's own package: its protocol is not public.

The package runs in a process of its own for each server, ``wandb_process.py``, from the first export on; an API process
never imports it. It resolves the server's name itself, so a URL is one of those for which the operator has set a key.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from api.deliveries import has_wandb
from api.exports.base import ExportedJob, Exporter, RunGoneError, by_step
from api.exports.server import ExportFailed, ExportServer, Limit
from api.routes.metrics import Points

_PROGRAM = Path(__file__).with_name("wandb_process.py")
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_EXIT_CODES = {"succeeded": 0, "failed": 1, "cancelled": 255}
"""By which W&B shows a run as finished, failed or killed."""
_OFFLINE = "offline"
_ENDED = "W&B's client ended; the next attempt begins another one"
_OFFLINE_S = 120.0
_LOOK_S = 0.2
_LONGEST_NAME = 128
_ROWS = """query Rows($project: String!, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { historyLineCount } } }"""


class WandbExporter(Exporter):
    """Makes one run for each job, in the project ``trivet-PROJECT``: its spec as configuration, its results as summary.

    An online run has the job's id, goes on after a retry, and keeps the first value of each step. The axis of steps is
    ``trivet/step``, since W&B takes its own steps in rising order only, for all metrics together.
    """

    holds_runs = True

    def __init__(self) -> None:
        self._clients: dict[str, WandbClient] = {}
        self._starting = threading.Lock()

    def begin(self, told: ExportedJob, server: ExportServer | None) -> str:
        job, client = told.job, self._client(server)
        client.ask(
            "begin",
            _limit(server),
            run_id=job.id,
            folder=_folder(told) if server is None else "",
            project=f"trivet-{job.project}",
            name=(job.name or job.id)[:_LONGEST_NAME],
            job_type=job.kind,
            group=job.sweep,
            config={**job.spec, "trivet": told.identity()},
        )
        client.runs.add(job.id)
        return json.dumps({"run": job.id, "by": client.name})

    def send(self, told: ExportedJob, server: ExportServer | None, mark: str, points: Mapping[str, Points]) -> str:
        self._holder(told, server, mark).ask("send", _limit(server), run_id=told.job.id, rows=by_step(points))
        return mark

    def end(self, told: ExportedJob, server: ExportServer | None, mark: str) -> str:
        client = self._holder(told, server, mark)
        results = {
            f"result/{name.replace('.', '/')}": each for name, each in (told.results() | told.findings()).items()
        }
        ended = client.ask(
            "end",
            _limit(server),
            run_id=told.job.id,
            exit_code=_EXIT_CODES[told.job.state],
            config={"trivet": told.facts()},
            summary=results | {"trivet/state": told.job.state},
        )
        client.runs.discard(told.job.id)
        if server is None:
            return f"{_folder(told)}, for `wandb sync`"
        _check_rows(server, told.job.id, ended)
        return str(ended["url"])

    def close(self) -> None:
        with self._starting:
            for client in self._clients.values():
                client.close()

    def _client(self, server: ExportServer | None) -> WandbClient:
        if not has_wandb():
            raise ExportFailed("the package wandb is not installed here: pip install 'trivet[wandb]'")
        key = "" if server is None else _key(server)
        url = _OFFLINE if server is None else server.url.rstrip("/")
        with self._starting:
            found = self._clients.get(url)
            if found is None or not found.is_alive:
                found = self._clients[url] = WandbClient({"url": url, "key": key})
            return found

    def _holder(self, told: ExportedJob, server: ExportServer | None, mark: str) -> WandbClient:
        """Return the client that has the run open. Raises :class:`RunGoneError` if that is another process's, or an
        earlier one: then a run of this client's is out of date, and is left without ending it.
        """
        client = self._client(server)
        if json.loads(mark)["by"] != client.name:
            if told.job.id in client.runs:
                client.close()
            raise RunGoneError("the run is open in another process")
        return client


class WandbClient:
    """A process with W&B's package, which has the runs on one server open. Threads may share it."""

    def __init__(self, server: Mapping[str, str]) -> None:
        self.name = secrets.token_hex(8)
        self.runs: set[str] = set()
        self._home = TemporaryDirectory(prefix="trivet-wandb-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(self._home.name),
            text=True,
        )
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._writing, self._calls = threading.Lock(), 0
        self._write(server)
        self._reader = threading.Thread(target=self._read, name="wandb", daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self._reader.is_alive()

    def ask(self, do: str, limit: Limit, **what: Any) -> dict[str, Any]:
        """Return the answer to a call. Raises :class:`ExportFailed`, also if there is none in time."""
        answer: Future[dict[str, Any]] = Future()
        with self._writing:
            self._calls += 1
            number = self._calls
            self._pending[number] = answer
        try:
            self._write({"call": number, "do": do, **what})
            while not answer.done():
                limit.check()
                if not self.is_alive:
                    raise ExportFailed(_ENDED)
                wait([answer], timeout=_LOOK_S)
        finally:
            self._pending.pop(number, None)
        found = answer.result()
        if "gone" in found:
            raise RunGoneError(found["gone"])
        if "error" in found:
            raise ExportFailed(found["error"])
        return dict(found["is"])

    def close(self) -> None:
        """End the process at once; open runs stay as they are, for the next process."""
        self._process.kill()
        self._reader.join()

    def _write(self, what: Mapping[str, Any]) -> None:
        line = json.dumps(what)
        pipe = self._process.stdin
        try:
            with self._writing:
                if pipe is not None:
                    pipe.write(f"{line}\n")
                    pipe.flush()
        except BrokenPipeError as error:
            raise ExportFailed(_ENDED) from error

    def _read(self) -> None:
        for line in self._process.stdout or ():
            answer = json.loads(line)
            if (waiting := self._pending.pop(answer["call"], None)) is not None:
                waiting.set_result(answer)
        self._process.wait()
        self._home.cleanup()
        while self._pending:
            self._pending.popitem()[1].set_result({"error": _ENDED})


def _environment(home: str) -> dict[str, str]:
    """Return an environment in which the client finds no settings, no keys and no proxy of this user's."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    own = dict.fromkeys(("HOME", "TMPDIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"), home)
    return passed_on | own | {"WANDB_ERROR_REPORTING": "false"}


def _folder(told: ExportedJob) -> str:
    return str(told.data.wandb / told.job.id)


def _limit(server: ExportServer | None) -> Limit:
    return Limit(_OFFLINE_S) if server is None else server.limit


def _key(server: ExportServer) -> str:
    if server.token is None:
        raise ExportFailed(f"TRIVET_EXPORT_TOKENS has no key for {server.url}")
    return server.token


def _check_rows(server: ExportServer, run_id: str, ended: Mapping[str, Any]) -> None:
    """Raise :class:`ExportFailed` unless the server has all rows: its client ends even if they were refused."""
    basic = base64.b64encode(f"api:{_key(server)}".encode()).decode()
    variables = {"project": ended["project"], "entity": ended["entity"], "name": run_id}
    answer = server.send(
        "POST",
        "/graphql",
        json={"query": _ROWS, "variables": variables, "operationName": "Rows"},
        headers={"authorization": f"Basic {basic}"},
    )
    try:
        kept = int(json.loads(answer.body)["data"]["model"]["bucket"]["historyLineCount"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExportFailed(f"the server answered {answer.shown}") from error
    if kept < ended["rows"]:
        raise ExportFailed(f"the server has {kept} of {ended['rows']} rows; it refused the rest")
