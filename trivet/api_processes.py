"""Runs the API's processes of this machine's service: they share its sockets, which stay open during restarts."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from service.jobs.layout import DataLayout
from service.jobs.private import PrivateSocket
from service.jobs.settings import Settings
from service.jobs.settings_file import ENV_PREFIX
from trivet.child_process import ChildProcess, ServiceTimes
from trivet.errors import TrivetError


class StartError(TrivetError):
    """The service cannot start."""


@dataclass
class ApiProcesses:
    """Binds the API's port at once, so that nobody takes it before the processes start. Raises :class:`StartError`."""

    settings: Settings
    times: ServiceTimes
    processes: list[ChildProcess] = field(default_factory=list)
    _ready: list[tuple[int, int]] = field(default_factory=list)
    """A pipe for each process, which writes a byte to its second end once it answers."""

    def __post_init__(self) -> None:
        self._listening = _listener(self.settings)
        self._private: PrivateSocket | None = None

    @property
    def url(self) -> str:
        host, port = self._listening.getsockname()[:2]
        scheme = "https" if self.settings.tls_cert else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @staticmethod
    def logs(data: DataLayout) -> Iterator[Path]:
        """Yield the logs of the processes of this service, or of an earlier one that had more."""
        yield from {data.root / "logs" / "api.log", *(data.root / "logs").glob("api-*.log")}

    def start(self, environment: Mapping[str, str]) -> dict[str, ChildProcess]:
        """Start as many processes as the setting says; return them by name."""
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

    def roll(self) -> list[str]:
        """Restart one process after the other, each once the previous one answers; return what to report."""
        said = []
        for process, (ready, _) in zip(self.processes, self._ready, strict=True):
            while _has_bytes(ready, 0.0):
                os.read(ready, 512)
            process.end()
            process.start()
            answers = _has_bytes(ready, self.times.ready_within_s)
            said.append(f"the {process.name} was restarted" + ("" if answers else ", and does not answer yet"))
        return said

    def ask_to_end(self) -> None:
        """Have the processes begin to end."""
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
