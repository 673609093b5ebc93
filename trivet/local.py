"""This machine's own service: broker, API and worker as children of one process, and their orderly end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from pydantic import SecretStr

from service.jobs.embedded import BrokerError, EmbeddedBroker
from service.jobs.settings import ENV_PREFIX, Settings
from trivet.client import Client
from trivet.connection import read_key
from trivet.errors import TrivetError
from trivet.part import Part, how

READY_WITHIN_S = 60.0
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Nothing that lies where the service is started takes the place of a module of the same name."""
_POLL_S = 0.1
_REPORT_S = 10.0
"""Beyond the ranks' grace: time for a supervisor to report its attempt's end."""


class StartError(TrivetError):
    """The service cannot start, or lost one of its parts."""


@dataclass
class LocalService:
    """Use as a context manager: entering starts everything and waits until a job could run; leaving ends it all."""

    settings: Settings
    broker: EmbeddedBroker | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    listening: socket.socket | None = None
    url: str = ""
    key: str | None = None
    first_start: bool = False

    def __enter__(self) -> Self:
        self.settings.data.mkdir(parents=True, exist_ok=True)
        had_key = self.settings.admin_key_file.exists()
        try:
            self.listening = _listener(self.settings)
            self._start(self.listening)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self.first_start = not had_key and self.settings.admin_key_file.exists()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def client(self) -> Client:
        return Client(self.url, self.key)

    def revive(self) -> list[str]:
        """Start again what ended by itself, jobs go on meanwhile; what to say of it.

        Raises :class:`StartError` for a part that soon ended once more.
        """
        said = []
        if self.broker is not None and (code := self.broker.process.poll()) is not None:
            said.append(f"the broker {how(code)} and is started again; its log is {self.broker.folder / 'server.log'}")
            try:
                self.broker.restart()
            except BrokerError as error:
                raise StartError(f"the broker {how(code)} and does not start again: {error}") from error
        for part in self.parts.values():
            if (ended := part.ended) is not None:
                if not part.settled:
                    raise StartError(_obituary(part, ended))
                said.append(f"{ended} and is started again; its log is {part.log}")
                part.start_again()
        return said

    def stop(self) -> None:
        """End worker, running jobs, API and broker, in this order. Jobs that ran wait for the next start."""
        worker = self.parts.pop("worker", None)
        if worker is not None:  # without a worker of its own, what runs on this host belongs to another service
            self._end_jobs(worker)
        if (api := self.parts.pop("API", None)) is not None:
            api.end()
        if self.listening is not None:
            self.listening.close()
        if self.broker is not None:
            self.broker.stop()
            self.broker = None

    def _end_jobs(self, worker: Part) -> None:
        launched = _children(worker.process.pid)
        worker.end()
        end_supervisors(self.settings, launched)

    def _start(self, listening: socket.socket) -> None:
        host, port = listening.getsockname()[:2]
        scheme = "https" if self.settings.tls_cert else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        environment = self._environment()
        descriptor = listening.fileno()
        self._spawn("API", ["-m", "api", "--fd", str(descriptor)], environment, (descriptor,))
        self._spawn("worker", ["-m", "workers"], environment)

    def _environment(self) -> dict[str, str]:
        if self.settings.redis_url is None:
            try:
                self.broker = EmbeddedBroker.start(self.settings.layout.broker)
            except BrokerError as error:
                raise StartError(str(error)) from error
            url = self.broker.url
        else:
            url = self.settings.broker_url
        given = self.settings.model_dump(include=self.settings.model_fields_set)
        chosen = {
            f"{ENV_PREFIX}{name.upper()}": "" if value is None else str(value)
            for name, value in given.items()
            if not isinstance(value, SecretStr)  # the children have the environment and the file that it came from
        }
        own = {f"{ENV_PREFIX}DATA": str(self.settings.layout.root), f"{ENV_PREFIX}REDIS_URL": url}
        return {**os.environ, **chosen, **own, **SAFE_PATH, "PYTHONUNBUFFERED": "1"}

    def _spawn(
        self, name: str, arguments: list[str], environment: dict[str, str], descriptors: tuple[int, ...] = ()
    ) -> None:
        log = self.settings.layout.root / "logs" / f"{name.lower()}.log"
        self.parts[name] = Part(name, arguments, environment, log, descriptors)

    def _wait_until_ready(self) -> None:
        key_file = self.settings.admin_key_file
        _until(lambda: self._alive() and Client(self.url, "none").is_ready(), "the API does not answer")
        secret = self.settings.key.get_secret_value() if self.settings.key else read_key(key_file)
        if secret is None:
            raise StartError(f"there is no key in {key_file}; set TRIVET_KEY to an admin key of this service")
        self.key = secret
        with self.client() as client:
            mine = self.settings.worker_name
            _until(
                lambda: self._alive() and any(host.alive and host.name == mine for host in client.hosts()),
                "the worker did not report itself",
            )

    def _alive(self) -> bool:
        for part in self.parts.values():
            if (ended := part.ended) is not None:
                raise StartError(_obituary(part, ended))
        return True


def end_supervisors(settings: Settings, launched: Sequence[psutil.Process] = ()) -> None:
    """Ask every supervisor of this host to end its group and to give its part back to the queue.

    ``launched`` are processes of the worker that may have a part to run and have not entered themselves yet.
    """
    processes = list({*_supervisors(settings.layout.host(settings.worker_name)), *launched})
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(processes, timeout=settings.stop_grace_s + _REPORT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # its keeper ends the group
    psutil.wait_procs(alive, timeout=_REPORT_S)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _supervisors(folder: Path) -> Iterator[psutil.Process]:
    """The supervisors that the worker entered in its folder and that still live."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            entry = json.loads(path.read_text())
            process = psutil.Process(entry["supervisor"]["pid"])
            if _start_ticks(process.pid) == entry["supervisor"]["started"]:
                yield process


def _start_ticks(pid: int) -> str | None:
    """A process's start time as the kernel counts it, so that a reused pid is not mistaken."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _listener(settings: Settings) -> socket.socket:
    """The API's socket, bound before anything starts; the child inherits it, so the port cannot be lost between."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise StartError(
            f"cannot bind {settings.host}:{settings.port} ({error.strerror}); is 'trivet up' running already? "
            f"For a second service set {ENV_PREFIX}PORT and {ENV_PREFIX}DATA"
        ) from None
    return listening


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not holds():
        if time.monotonic() > deadline:
            raise StartError(f"{otherwise} within {READY_WITHIN_S:.0f} s")
        time.sleep(_POLL_S)


def _obituary(part: Part, ended: str) -> str:
    return f"{ended}; {part.log} says:\n{part.last_lines()}"
