"""Starts and ends one torchrun group: a keeper, behind it a launcher, behind that the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from service.jobs.events import OddWord, read_object
from service.jobs.files import Folder, remove_tree
from service.jobs.host import Process
from service.linux import ROOM
from workers import forks
from workers.launcher import program as launcher
from workers.launcher.confinement import Confinement
from workers.supervisor import keeper

_KEEPER = (sys.executable, "-I", "-S", keeper.__file__)
_TAIL = 20
_KEEPER_GRACE_S = 5.0
"""The time that a keeper gets to end its group: it needs milliseconds."""
_REPORT = "exit-codes.json"
_RANK = re.compile(r"\d{1,7}", re.ASCII)
_LARGEST = 1 << 20
"""The most bytes read of the launcher's output."""
_SCRATCH = "trivet-group-"
_SHORT = "/tmp"  # noqa: S108 - only for folders that mkdtemp makes, private and with a name nobody can foresee
_LONGEST_FOLDER = 80
"""A unix socket's path may have some 100 bytes."""


def exit_codes_in(folder: Path) -> dict[int, int]:
    """Return the exit codes of ranks that a launcher reported in this folder. A rank can write there in its place, so
    what torchrun does not write is left out.
    """
    try:
        with Folder.open(folder) as opened:
            told = read_object(opened.read(_REPORT, _LARGEST))
    except (OSError, OddWord):  # there is no report, or the launcher was ended while it wrote it
        return {}
    return {int(rank): code for rank, code in told.items() if _RANK.fullmatch(rank) and _is_code(code)}


def _is_code(value: object) -> bool:
    """Return whether a value is an exit code, or the negative number of a signal."""
    return type(value) is int and -signal.NSIG < value < 256


def _scratch_folder() -> Path:
    """Make a private folder whose path leaves room for a socket's name, wherever TMPDIR points.

    Its name has the process's id, so that :func:`remove_leftovers` recognises the folder of a killed process.
    """
    me = Process.of(os.getpid())
    assert me is not None
    prefix = f"{_SCRATCH}{me.pid}.{me.started}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder)) <= _LONGEST_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_SHORT))


def remove_leftovers() -> list[Path]:
    """Delete the scratch folders that ended processes of this user left; return what was deleted. A process of another
    container, whose number means nothing here, holds the lock of its folder; without locks nothing is deleted.
    """
    gone = []
    for folder in {folder for where in (tempfile.gettempdir(), _SHORT) for folder in Path(where).glob(f"{_SCRATCH}*")}:
        with contextlib.suppress(OSError, ValueError):
            pid, started = folder.name.removeprefix(_SCRATCH).split("-")[0].split(".")
            if folder.lstat().st_uid == os.getuid() and not Process(int(pid), started).alive:
                with Folder.open(folder) as opened:
                    fcntl.flock(opened.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
                gone.append(folder)
    return gone


@dataclass(frozen=True)
class _KeeperEnds:
    """Holds a keeper's descriptors: its life pipe, the launcher's request, the launcher's output."""

    life: int
    request: int
    output: int


class _SpawnedProcess(Protocol):
    """A child of this process."""

    @property
    def pid(self) -> int:
        """Return the process's number."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit status."""

    def kill(self) -> None:
        """Kill it."""


def _spawn(
    ends: _KeeperEnds, environment: Mapping[str, str], *, own_namespaces: bool, preload: bool
) -> _SpawnedProcess:
    """Start a keeper, which starts a launcher that imports everything."""
    options = ([launcher.OWN_NAMESPACES] if own_namespaces else []) + ([launcher.PRELOAD] if preload else [])
    command = [sys.executable, "-u", "-P", "-m", "workers.launcher", *options]
    return subprocess.Popen(
        [*_KEEPER, str(ends.life), *command],
        stdin=ends.request,
        stdout=ends.output,
        stderr=ends.output,
        env={**environment, **ROOM},
        pass_fds=(ends.life,),
        start_new_session=True,
    )


def _fork(ends: _KeeperEnds, environment: Mapping[str, str], *, own_namespaces: bool, preload: bool) -> _SpawnedProcess:
    """Fork a keeper from this process, and a launcher from the keeper.

    The keeper then becomes its usual program, without this process's imports.
    """

    def keep() -> int:
        keeper.become_subreaper()
        child = forks.fork(
            lambda: launcher.run_fork(environment, own_namespaces=own_namespaces, preload=preload),
            stdin=0,
            session=False,
        )
        os.set_inheritable(ends.life, True)
        os.execve(_KEEPER[0], [*_KEEPER, str(ends.life), keeper.CHILD, str(child.pid)], dict(environment))  # noqa: S606 - there is nothing for a shell to do

    return forks.fork(keep, stdin=ends.request, output=ends.output, keep=[ends.life])


class Group:
    """Starts at once, without work; :meth:`launch` gives it some. None of its processes outlives this object's
    process. With ``preload``, the launcher imports what Trivet's own ranks need before it forks several. With
    ``forked``, it is a fork of this process, which has imported much of all that and knows nothing yet that ranks may
    not. With ``adopting``, for a process without other children, nothing outlives a killed keeper either.

    ``folder`` is private and short-lived: the event socket, the launcher's output, and folders in which ranks may
    write: torchrun's own files, their scratch, their meeting point.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        own_namespaces: bool = True,
        adopting: bool = False,
        preload: bool = False,
        forked: bool = False,
    ) -> None:
        self._adopting = adopting
        if adopting:
            keeper.become_subreaper()
        self.folder = _scratch_folder()
        self._in_use = Folder.open(self.folder)
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(self._in_use.descriptor, fcntl.LOCK_SH)
        self.logs.mkdir(mode=0o700)
        life, self._life = os.pipe()
        os.set_blocking(self._life, False)
        self._lock = threading.Lock()
        start = _fork if forked else _spawn
        given, request = os.pipe()
        with Folder.open(self.folder) as folder:
            written = folder.create("launcher.log", 0o600)
            self._output = folder.reader("launcher.log")
        self._request = os.fdopen(request, "wb")
        with written:
            ends = _KeeperEnds(life, given, written.fileno())
            self._keeper = start(ends, environment, own_namespaces=own_namespaces, preload=preload)
        os.close(given)
        os.close(life)

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    @property
    def socket(self) -> Path:
        return self.folder / "events"

    @property
    def logs(self) -> Path:
        """Return the folder for torchrun's own files."""
        return self.folder / "torchrun"

    def launch(
        self,
        kind: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        confinement: Confinement,
        *,
        ranks: int,
    ) -> None:
        """Start torchrun with ``arguments``, by which it starts so many ranks here, in ``folder``, within
        ``confinement``, for a job of this kind.
        """
        request = {
            "kind": kind,
            "ranks": ranks,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(folder),
            "report": str(self.folder / _REPORT),
            "confinement": confinement.to_json(),
        }
        with contextlib.suppress(BrokenPipeError), self._request as pipe:  # it may have died: wait() will tell
            pipe.write(json.dumps(request).encode() + b"\n")

    def extend(self, until: float) -> None:
        """Let the group run until the :func:`service.linux.uptime` ``until``. Safe to call in any thread."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._life >= 0:
                os.write(self._life, b"%.6f\n" % until)

    def kill(self) -> None:
        """Have the keeper end everything; :meth:`wait` returns when that is done.

        A keeper that is stopped or hangs is killed after a moment, and then its remaining processes.
        """
        with self._lock:
            if self._life < 0:
                return
            os.close(self._life)
            self._life = -1
        with contextlib.suppress(RuntimeError):  # without a loop, nobody waits in one
            asyncio.get_running_loop().call_later(_KEEPER_GRACE_S, self._keeper.kill)

    async def wait(self) -> int:
        """Return the launcher's exit code, once no process of the group is left."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        handle = os.pidfd_open(self._keeper.pid)
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        code = self._keeper.wait()
        await asyncio.to_thread(self._end_orphans)
        return code

    def _end_orphans(self) -> None:
        """End the processes that a killed keeper left."""
        if self._adopting:
            keeper.end_descendants()

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of failed ranks (negative: the signal), as far as torchrun reported them."""
        return exit_codes_in(self.folder)

    def last_output(self) -> list[str]:
        """Return the last lines of torchrun, or of a rank that had not reached its supervisor."""
        return self.output().decode(errors="replace").splitlines()[-_TAIL:]

    def output(self) -> bytes:
        """Return the end of the launcher's output, which :meth:`close` removes."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), _LARGEST, max(0, size - _LARGEST))

    def close(self) -> None:
        """End all processes, and remove the folder."""
        self.kill()
        try:
            self._keeper.wait(_KEEPER_GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._end_orphans()
        with contextlib.suppress(BrokenPipeError):
            self._request.close()
        self._output.close()
        self._in_use.close()
        remove_tree(self.folder)
