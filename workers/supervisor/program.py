"""Runs the supervisor: one process per attempt and host, which outlives the worker that started it.

``python -m workers.supervisor`` reads one :class:`workers.supervisor.settings.SupervisorOrder` from standard input.
Before that it starts its group's keeper and launcher, which meanwhile import what ranks need. With ``--fork-server`` or
``--light-fork-server`` it imports first, and forks such supervisors on request: :mod:`workers.supervisor.fork_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from workers.supervisor.command import allowed
from workers.supervisor.group import Group

HOST_NAMESPACES = "--host-namespaces"
"""The argument that keeps launchers in the host's namespaces."""
FORK_SERVER, LIGHT_FORK_SERVER = "--fork-server", "--light-fork-server"
"""The arguments for forking supervisors rather than being one, with torch imported and without."""
_RANK_PROGRAM: tuple[str, ...] = ("-m", "workers.rank")


def main(program: Sequence[str] = _RANK_PROGRAM) -> int:
    """Run until the attempt has ended. ``program`` is what torchrun starts as ranks; no spec can choose it.

    SIGINT gives the part back to the queue, as when the service on this host stops; before there is a part, it ends
    the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    own_namespaces, preload = HOST_NAMESPACES not in sys.argv, program == _RANK_PROGRAM
    light = LIGHT_FORK_SERVER in sys.argv
    if light or FORK_SERVER in sys.argv:
        from workers.supervisor.fork_server import ForkServer  # noqa: PLC0415 - it brings what one supervisor has no use for

        work = partial(run, program=program)
        return ForkServer(work, own_namespaces=own_namespaces, preload=preload, light=light).serve()
    group = Group(allowed(os.environ), own_namespaces=own_namespaces, adopting=True, preload=preload)
    return run(group, program)


def run(group: Group, program: Sequence[str]) -> int:
    """Read the order from standard input and carry it out with this group, which always ends."""
    try:
        # Imported while the launcher imports torch.
        from service.jobs.files import DataLayout  # noqa: PLC0415
        from service.jobs.host import SupervisorRegistry  # noqa: PLC0415
        from service.jobs.text import log_to_stderr  # noqa: PLC0415
        from workers.supervisor.attempt import supervise  # noqa: PLC0415
        from workers.supervisor.lease import give_back  # noqa: PLC0415
        from workers.supervisor.settings import SupervisorOrder, SupervisorSettings  # noqa: PLC0415

        line = sys.stdin.readline()
        if not line:
            return 0
        order = SupervisorOrder.from_line(line)
        layout = f"%(asctime)s {order.ref} %(levelname)s %(message)s"
        log_to_stderr(
            "info",
            layout,
            order.log_format,
            process="supervisor",
            job=order.job_id,
            attempt=order.attempt,
            host=order.host,
        )
        registry = SupervisorRegistry(DataLayout(Path(order.data)).host(order.host))
        with contextlib.ExitStack() as stack:
            try:
                entered = stack.enter_context(registry.entered(order.ref, group.keeper_pid, group.folder))
            except OSError as error:
                asyncio.run(give_back(order, error, SupervisorSettings()))
                return 0
            if entered:
                asyncio.run(supervise(order, group, program, SupervisorSettings()))
    finally:
        group.close()
    return 0
