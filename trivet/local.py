"""Runs this machine's own service: broker, API and worker as children of one process, and their orderly end."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from pydantic import SecretStr

from service.jobs.files import DataLayout, free_bytes
from service.jobs.host import (
    ENV_PREFIX,
    LockedError,
    NotPrivateError,
    PrivateSocket,
    ProcessLock,
    SupervisorRegistry,
    bind_port,
    close_to_others,
    end_processes,
    holders,
    read_private,
    url_of,
)
from service.jobs.host.embedded_broker import BrokerError, EmbeddedBroker, end_leftover
from service.jobs.settings import Settings
from trivet.child_process import ChildProcess, Restarts, ServiceTimes, lock_of
from trivet.client import Client
from trivet.errors import TrivetError

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""No file in the service's starting folder may shadow a module of the same name."""
_POLL_S = 0.1
_PROBE_S = 5.0
"""Seconds for an answer at a socket that is open before anybody answers there."""
_LITTLE_DISK = 1 << 20
"""Bytes of a disk that is as good as full."""


def _how(code: int) -> str:
    """Return a process's exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


class StartError(TrivetError):
    """The service cannot start."""


@dataclass
class _ApiProcesses:
    """Binds the API's port at once, so that it is not taken before the processes start. Raises :class:`StartError`."""

    settings: Settings
    times: ServiceTimes
    processes: list[ChildProcess] = field(default_factory=list)
    _ready: list[tuple[int, int]] = field(default_factory=list)
    """A pipe for each process; the process writes a byte to its second end once it answers."""

    def __post_init__(self) -> None:
        self._listening = _listener(self.settings)
        self._private: PrivateSocket | None = None

    @property
    def url(self) -> str:
        return url_of(self._listening, tls=self.settings.tls_cert is not None)

    @staticmethod
    def logs(data: DataLayout) -> Iterator[Path]:
        """Yield the logs of the processes of this service, or of an earlier one that had more."""
        yield from {data.root / "logs" / "api.log", *(data.root / "logs").glob("api-*.log")}

    def start(self, environment: Mapping[str, str]) -> dict[str, ChildProcess]:
        """Start the configured number of processes; return them by name."""
        self._private = PrivateSocket.bind(self.settings.layout, self.url)
        if self._private is not None:
            self._private.bound.listen()
        self._listening.listen()
        for number in range(1, self.settings.api_processes + 1):
            self.processes.append(self._start_one("API" if number == 1 else f"API-{number}", environment))
        return {process.name: process for process in self.processes}

    def _start_one(self, name: str, environment: Mapping[str, str]) -> ChildProcess:
        reader, writer = os.pipe()
        self._ready.append((reader, writer))
        descriptors = {"--fd": self._listening.fileno(), "--ready-fd": writer}
        if self._private is not None:
            descriptors["--private-fd"] = self._private.bound.fileno()
        options = [word for option, descriptor in descriptors.items() for word in (option, str(descriptor))]
        log = self.settings.layout.root / "logs" / f"{name.lower()}.log"
        return ChildProcess(name, ["-m", "api", *options], environment, log, tuple(descriptors.values()), self.times)

    def roll(self, restart: Callable[[ChildProcess], str]) -> list[str]:
        """Restart one process after the other, each once the previous one answers; return what to report."""
        said = []
        for process, (ready, _) in zip(self.processes, self._ready, strict=True):
            while _has_bytes(ready, 0.0):
                os.read(ready, 512)
            told = restart(process)
            answers = process.process.poll() is not None or _has_bytes(ready, self.times.ready_within_s)
            said.append(told if answers else f"{told}, and does not answer yet")
        return said

    def ask_to_end(self) -> None:
        for process in self.processes:
            process.process.terminate()

    def end(self) -> None:
        """End the processes, and remove the sockets."""
        self.ask_to_end()
        for process in self.processes:
            process.end()
        self._listening.close()
        if self._private is not None:
            self._private.close()
        for pipe in self._ready:
            for end in pipe:
                os.close(end)


def _has_bytes(reader: int, within_s: float) -> bool:
    return bool(select.select([reader], [], [], within_s)[0])


def _listener(settings: Settings) -> socket.socket:
    """Bind the API's socket before anything starts; the child inherits it, so the port cannot be lost between."""
    try:
        return bind_port(settings.host, settings.port)
    except OSError as error:
        raise StartError(
            f"cannot bind {settings.host}:{settings.port} ({error.strerror}); is 'trivet up' running already? "
            f"For a second service set {ENV_PREFIX}PORT and {ENV_PREFIX}DATA"
        ) from None


@dataclass
class LocalService:
    """Use as a context manager: entering starts everything and waits until a job could run; leaving ends it all.

    A data folder has one such service at a time. Processes that a killed service left behind are ended first,
    except supervisors: their jobs go on.
    """

    settings: Settings
    times: ServiceTimes = field(default_factory=ServiceTimes)
    broker: EmbeddedBroker | None = None
    parts: dict[str, ChildProcess] = field(default_factory=dict)
    restarts: dict[str, Restarts] = field(default_factory=lambda: defaultdict(Restarts))
    api: _ApiProcesses | None = None
    lock: ProcessLock | None = None
    leftovers: list[str] = field(default_factory=list)
    """Names of the parts that were ended without having been known: of a killed service, or of an interrupted start."""
    said: list[str] = field(default_factory=list)
    """Messages of :meth:`revive` during the start."""
    was_open: bool = False
    """Whether other users could read the data folder until this start."""
    url: str = ""
    key: str | None = None
    first_start: bool = False

    def __enter__(self) -> Self:
        try:
            self.was_open = close_to_others(self.settings.layout.root)
        except NotPrivateError as error:
            raise StartError(str(error)) from None
        had_key = self.settings.admin_key_path.exists()
        try:
            self.lock = self._lock_data_folder()
            self._end_leftovers()
            self.api = _ApiProcesses(self.settings, self.times)
            self._start(self.api)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self.first_start = not had_key and self.settings.admin_key_path.exists()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self) -> Client:
        return Client(f"unix://{self.settings.layout.api_socket}", self.key)

    def revive(self) -> list[str]:
        """Start parts again that ended by themselves, while jobs go on; return messages about it.

        A part that keeps ending is started after longer and longer pauses, but never given up: a passing cause
        (a broker that hangs, a full disk) must not end the service.
        """
        said = []
        if self.broker is not None:
            log, code = self.broker.folder / "server.log", self.broker.process.poll()
            said += self._revive("broker", None if code is None else _how(code), log, self._restart_broker)
        for name, part in self.parts.items():
            code = part.process.poll()
            said += self._revive(name, None if code is None else _how(code), part.log, part.start)
        return said

    def _revive(self, name: str, ended: str | None, log: Path, start: Callable[[], None]) -> list[str]:
        if ended is None:
            return []
        restarts, said = self.restarts[name], []
        if restarts.ended(time.monotonic()):
            pause = f" in {restarts.pause_s:.0f} s" if restarts.pause_s else ""
            free = free_bytes(log)
            full = f", on a disk of which {free} bytes are free" if free < _LITTLE_DISK else ""
            said.append(f"the {name} {ended} and is restarted{pause}; its log is {log}{full}")
        if restarts.is_due(time.monotonic()) and (why := self._start_again(name, start)) is not None:
            said.append(why)
        return said

    def _start_again(self, name: str, start: Callable[[], None]) -> str | None:
        """Start a part that has ended; return why it does not start, if it does not."""
        self.restarts[name].started(time.monotonic())
        try:
            start()
        except (BrokerError, OSError) as error:
            return f"the {name} does not start: {error}"
        return None

    def _restart_broker(self) -> None:
        assert self.broker is not None
        self.broker.restart()

    def roll(self) -> list[str]:
        """Restart every part, one after the other, while jobs run on; return messages about it.

        No request is lost: API processes finish their requests before they end, and new requests wait for the
        next process at the socket, and for the broker within ``broker_wait_s``. A part that does not start is left to
        :meth:`revive`.
        """
        assert self.api is not None
        said = self.api.roll(self._restart_part)
        said += [self._restart_part(part) for part in self.parts.values() if part not in self.api.processes]
        if self.broker is not None:
            self.broker.end_server()
            said.append(self._start_again("broker", self._restart_broker) or "the broker was restarted")
        return said

    def _restart_part(self, part: ChildProcess) -> str:
        part.end()
        return self._start_again(part.name, part.start) or f"the {part.name} was restarted"

    def stop(self) -> None:
        """End worker, running jobs, API and broker, in this order. Running jobs wait for the next start. If no
        job runs here, the API ends at the same time as the worker.
        """
        worker = self.parts.pop("worker", None)
        if worker is not None:  # without its own worker, running jobs on this host belong to another service
            if self.api is not None and not self._registry().live():
                self.api.ask_to_end()
            self._end_jobs(worker)
        if self.api is not None:
            self.api.end()
            self.parts.clear()
            self.api = None
        if self.broker is not None:
            self.broker.stop()
            self.broker = None
        if self.lock is not None:
            self._end_leftovers()  # a signal that came while a part was started kept it unknown here
            self.lock.close()

    def _lock_data_folder(self) -> ProcessLock:
        root = self.settings.layout.root
        try:
            return ProcessLock(root / "up.lock")
        except LockedError:
            raise StartError(
                f"another 'trivet up' already runs on {root}; stop it, or set {ENV_PREFIX}DATA to another folder"
            ) from None

    def _end_leftovers(self) -> None:
        for log in _ApiProcesses.logs(self.settings.layout):  # they may hold the port
            self._end_leftover("API", log)
        self._end_leftover("worker", self._log("worker"))
        if end_leftover(self.settings.layout.broker):
            self.leftovers.append("broker")

    def _end_leftover(self, name: str, log: Path) -> None:
        if found := holders(lock_of(log)):
            end_processes(found, self.times.ends_within_s)
            self.leftovers.append(name)

    def _log(self, name: str) -> Path:
        return self.settings.layout.root / "logs" / f"{name.lower()}.log"

    def _end_jobs(self, worker: ChildProcess) -> None:
        launched = _children(worker.process.pid)
        worker.end()
        self._registry().stop_all(launched, self.settings.stop_grace_s, self.times.report_within_s)

    def _registry(self) -> SupervisorRegistry:
        return SupervisorRegistry(self.settings.layout.host(self.settings.worker_name))

    def _start(self, api: _ApiProcesses) -> None:
        self.url = api.url
        environment = self._environment()
        self.parts |= api.start(environment)
        self.parts["worker"] = ChildProcess(
            "worker", ["-m", "workers"], environment, self._log("worker"), times=self.times
        )

    def _environment(self) -> dict[str, str]:
        if self.settings.redis_url is None:
            try:
                self.broker = EmbeddedBroker.start(self.settings.layout.broker, fsync=self.settings.broker_fsync)
            except BrokerError as error:
                raise StartError(str(error)) from error
            url = self.broker.url
        else:
            url = self.settings.broker_url
        given = self.settings.model_dump(include=self.settings.model_fields_set)
        chosen = {
            f"{ENV_PREFIX}{name.upper()}": "" if value is None else str(value)
            for name, value in given.items()
            if not isinstance(value, SecretStr)  # the children inherit the environment and the file
        }
        own = {f"{ENV_PREFIX}DATA": str(self.settings.layout.root), f"{ENV_PREFIX}REDIS_URL": url}
        return {**os.environ, **chosen, **own, **SAFE_PATH, "PYTHONUNBUFFERED": "1"}

    def _wait_until_ready(self) -> None:
        key_file = self.settings.admin_key_path
        within_s = self.times.ready_within_s
        own = f"unix://{self.settings.layout.api_socket}"  # its certificate need not be for this address
        _until(
            lambda: self._alive() and Client(own, "none", timeout_s=_PROBE_S).is_ready(),
            within_s,
            "the API does not answer",
        )
        secret = self.settings.key.get_secret_value() if self.settings.key else read_private(key_file)
        if secret is None:
            raise StartError(f"there is no key in {key_file}; set TRIVET_KEY to an admin key of this service")
        self.key = secret
        with self.client() as client:
            mine = self.settings.worker_name
            _until(
                lambda: self._alive() and any(host.alive and host.name == mine for host in client.hosts()),
                within_s,
                "the worker did not report itself",
            )

    def _alive(self) -> bool:
        """Start parts again that were ended from outside; raise :class:`StartError` for a part that fails by itself."""
        for part in self.parts.values():
            if (part.process.poll() or 0) > 0 and not self.said:
                raise StartError(
                    f"the {part.name} {_how(part.process.poll() or 0)}; {part.log} says:\n{part.last_lines()}"
                )
        self.said += self.revive()
        return True


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _until(holds: Callable[[], bool], within_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise StartError(f"{otherwise} within {within_s:.0f} s")
        time.sleep(_POLL_S)
