"""Forks supervisors from one process of this host that has imported what they, their launchers and the ranks of every
kind of job need, torch above all: a fork takes milliseconds where the imports take seconds, and imported modules occupy
memory once.

What few jobs need it imports once no supervisor has been wanted for a while. Meanwhile a fork of it, which has not,
goes on forking supervisors; so no job waits for those imports, and one that makes a process unfit for forks spoils
nothing.

The process has one thread and no GPU device, and never sees the contents of a job: a supervisor gets its environment
and its order over a connection of its own, from the agent, after it has forked its keeper and launcher. So nothing of
the service's secrets is in the memory of a rank. When anything that it imported changes on disk
(:mod:`workers.supervisor.image`), it ends and the agent starts another. It also ends with the agent.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from service.garbage import uncollected
from workers import forks
from workers.linux import die_with_parent, present_as, use_large_pages
from workers.supervisor.group import Group
from workers.supervisor.image import ImportedImage

READY = b"ready"
"""The server's message when it can fork. A fork that waits for its order sends its process id, in digits."""
_LOOK_S = 2.0
"""The pause between two checks of the disk."""
_QUIET_S = 10.0
"""How long no supervisor has been wanted when the rest is imported."""

logger = logging.getLogger(__name__)


class ForkServer:
    """Serves the agent at the other end of standard input, a message socket. Each fork calls ``run``."""

    def __init__(
        self, run: Callable[[Group], int], *, own_namespaces: bool, preload: bool, quiet_s: float = _QUIET_S
    ) -> None:
        self._run, self._own_namespaces, self._preload, self._quiet_s = run, own_namespaces, preload, quiet_s
        self._control = socket.socket(fileno=os.dup(0))
        # An import that reads standard input must not swallow a connection of the agent's.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def serve(self) -> int:
        """Import everything, then fork a supervisor for each connection that the agent passes. Return 0 when
        the agent hangs up or the disk has changed, 1 if this process cannot be forked.
        """
        die_with_parent()  # the imports take seconds, in which nothing is read
        image = ImportedImage.before_imports()
        with uncollected():
            environment = _import(preload=self._preload)
        if reason := self._unfit():
            logger.error("no supervisors are forked here: an import left %s", reason)
            return 1
        _settle(image)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects supervisors that have ended
        if changed := image.change():  # during the imports: some modules could be those of before, and others of after
            logger.warning("another process forks supervisors: %s", changed)
            return 0
        self._control.send(READY)
        code = self._fork_until_change(image, environment, quiet_s=self._quiet_s if self._preload else math.inf)
        if code is None and (code := self._import_the_rest(image, environment)) is None:
            code = self._fork_until_change(image, environment)
        return code or 0

    def _import_the_rest(self, image: ImportedImage, environment: Mapping[str, str]) -> int | None:
        """Import what few jobs need, while a fork serves; return its exit code, or ``None`` once this process can."""
        from workers.launcher import preloading  # noqa: PLC0415 - imported already; it is slow

        ours, theirs = socket.socketpair()
        with ours:
            with theirs, Path(os.devnull).open("rb") as nothing:
                held = [self._control.fileno(), image.descriptor, theirs.fileno()]
                stand_in = partial(self._stand_in, image, environment, theirs)
                forks.fork(stand_in, stdin=nothing.fileno(), keep=held, session=False)
            with uncollected():
                preloading.preload_the_rest()
            if reason := self._unfit():
                logger.warning("each job of a kind that preloads later imports everything: here it left %s", reason)
            else:
                _settle(image)
                with contextlib.suppress(OSError):  # it has ended by itself
                    ours.shutdown(socket.SHUT_WR)
            code = ours.recv(1)
        if not code:
            return 1 if reason else None
        return int(code)

    def _stand_in(self, image: ImportedImage, environment: Mapping[str, str], line: socket.socket) -> int:
        """Fork in place of this process's parent until that can again; tell it the exit code of another end."""
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        code = self._fork_until_change(image, environment, relief=line)
        line.send(b"" if code is None else b"%d" % code)
        return 0

    def _fork_until_change(
        self,
        image: ImportedImage,
        environment: Mapping[str, str],
        *,
        quiet_s: float = math.inf,
        relief: socket.socket | None = None,
    ) -> int | None:
        """Fork as long as a fork is like a new process; return the exit code of :meth:`serve`, or ``None`` as soon as
        no supervisor has been wanted for ``quiet_s``, or the other end of ``relief`` is closed: another process
        takes over.
        """
        changed, reason, wanted_at = image.change(), "", time.monotonic()
        lines = [self._control, *([relief] if relief else [])]
        while not (changed or reason):
            descriptors: list[int] = []
            ready = select.select(lines, [], [], min(_LOOK_S, quiet_s))[0]
            if relief in ready or (not ready and time.monotonic() - wanted_at >= quiet_s):
                return None
            if ready:
                wanted_at = time.monotonic()
                message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                if not message:
                    return 0
            # Looked at after the connection has come: it notices changes from before its job was submitted.
            changed, reason = image.change(), self._unfit()
            # Others end with this process, and the agent then starts their supervisors itself.
            for connection in descriptors if not (changed or reason) else ():
                forks.fork(lambda: self._supervise(environment), stdin=connection)
                os.close(connection)
        logger.warning("another process forks supervisors from now on: %s", changed or reason)
        return 0 if changed else 1

    def _unfit(self) -> str:
        """Return why this process cannot be forked; empty if it can."""
        if len(names := forks.threads()) > 1:
            return f"threads ({', '.join(names)})"
        return f"devices open ({', '.join(devices)})" if (devices := forks.open_devices()) else ""

    def _supervise(self, environment: Mapping[str, str]) -> int:
        """Act as a supervisor.

        The agent's environment, which ranks must not see, comes before the order and after the launcher has been
        forked.
        """
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler raises wherever it comes, in an import too
        # The agent watches this process from now on: it is not its child, and only it can say its id.
        os.write(0, b"%d" % os.getpid())
        present_as([sys.executable, "-m", "workers.supervisor"], {})
        group = Group(environment, own_namespaces=self._own_namespaces, adopting=True, forked=True)
        if line := sys.stdin.readline():
            os.environ.clear()
            os.environ.update(json.loads(line))
        return self._run(group)


def _settle(image: ImportedImage) -> None:
    """Note what has been imported, and make forks of it cheap."""
    image.take()
    gc.collect()
    gc.freeze()  # so that no fork copies the pages of all objects with its first collection
    use_large_pages()


def _import(*, preload: bool) -> dict[str, str]:
    """Import everything that supervisors, launchers and ranks need; return the launchers' initial environment."""
    from workers.launcher.program import import_torchrun  # noqa: PLC0415

    environment = import_torchrun()
    from workers.launcher import forked_ranks, preloading  # noqa: F401, PLC0415
    from workers.supervisor import attempt, job_policy, lease  # noqa: F401, PLC0415

    job_policy.plugins()
    if preload:
        from workers.rank import program  # noqa: F401, PLC0415

        preloading.preload_every_kind()
    return environment
