"""Forks supervisors from one process of this host that has imported what they, their launchers and the ranks of every
kind of job need, torch above all: a fork takes milliseconds where the imports take seconds, and imported modules occupy
memory once. On an idle host its place is taken by a light one, which has imported all that supervisors and launchers
need but torch: there each launcher imports the rest itself.

The process has one thread and no GPU device, and never sees the contents of a job: a supervisor gets its environment
and its order over a connection of its own, from the agent, after it has forked its keeper and launcher. So nothing of
the service's secrets is in the memory of a rank. When anything that it imported changes on disk
(:mod:`workers.supervisor.image`), it ends and the agent starts another. It also ends with the agent.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from service.garbage import uncollected
from service.linux import die_with_parent, present_as, use_large_pages
from workers import forks
from workers.supervisor.group import Group
from workers.supervisor.image import ImportedImage

READY = b"ready"
"""The server's message when it can fork. A fork that waits for its order sends its process id, in digits."""
_LOOK_S = 2.0
"""The pause between two checks of the disk."""

logger = logging.getLogger(__name__)


class ForkServer:
    """Serves the agent at the other end of standard input, a message socket. Each fork calls ``run``."""

    def __init__(self, run: Callable[[Group], int], *, own_namespaces: bool, preload: bool, light: bool) -> None:
        self._run, self._own_namespaces = run, own_namespaces
        self._preload, self._light = preload, light
        self._control = socket.socket(fileno=os.dup(0))
        # An import that reads standard input must not swallow a connection of the agent's.
        forks.empty_input()

    def serve(self) -> int:
        """Import everything, then fork a supervisor for each connection that the agent passes. Return 0 when
        the agent hangs up or the disk has changed, 1 if this process cannot be forked.
        """
        die_with_parent()  # the imports take seconds, in which nothing is read
        image = ImportedImage.before_imports()
        with uncollected():
            environment = _import_all_but_torch()
            if not self._light:
                _import_the_rest(preload=self._preload)
        image.take()
        if reason := self._unfit():
            logger.error("no supervisors are forked here: an import left %s", reason)
            return 1
        gc.collect()
        gc.freeze()  # so that no fork copies the pages of all objects with its first collection
        if not self._light:  # large pages would have it take more memory
            use_large_pages()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects supervisors that have ended
        return self._fork_until_change(image, environment)

    def _fork_until_change(self, image: ImportedImage, environment: Mapping[str, str]) -> int:
        """Fork as long as a fork is like a new process; return the exit code of :meth:`serve`."""
        changed, reason = image.change(), ""
        if not changed:  # during the imports: some modules could be those of before, and others of after
            self._control.send(READY)
        while not (changed or reason):
            descriptors: list[int] = []
            if select.select([self._control], [], [], _LOOK_S)[0]:
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
        preload = self._preload and self._light
        group = Group(environment, own_namespaces=self._own_namespaces, adopting=True, preload=preload, forked=True)
        if line := sys.stdin.readline():
            os.environ.clear()
            os.environ.update(json.loads(line))
        return self._run(group)


def _import_all_but_torch() -> dict[str, str]:
    """Import what supervisors and launchers need besides torch; return the launchers' initial environment."""
    from workers.launcher.program import prepare_environment  # noqa: PLC0415

    environment = prepare_environment()
    from workers.launcher import preloading  # noqa: F401, PLC0415 - it brings the kinds
    from workers.supervisor import attempt, job_policy, lease  # noqa: F401, PLC0415

    job_policy.plugins()
    return environment


def _import_the_rest(*, preload: bool) -> None:
    """Import torch, and with ``preload`` what the ranks of every kind need."""
    from workers.launcher.program import import_torchrun  # noqa: PLC0415

    import_torchrun()
    from workers.launcher import forked_ranks, preloading  # noqa: F401, PLC0415

    if preload:
        from workers.rank import program  # noqa: F401, PLC0415

        preloading.preload_every_kind()
