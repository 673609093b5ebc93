"""Supervisors that are forked from a process which has imported what they, their launchers and their ranks need.

What runs is what ``python -m workers.supervisor`` would run. Its keeper and launcher come about as those of the
service's fork server do; that one itself has one program, environment and folder for all that it forks, and does not
tell how they ended. Those who listen at an address pass a supervisor's three standard files; they are answered its
process id and, once it has ended, its exit status.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from service.linux import die_with_parent, present_as
from workers import forks
from workers.launcher import folder_rendezvous, forked_ranks
from workers.supervisor import group

BEFOREHAND = (
    "torch.distributed.run",
    "workers.launcher.folder_rendezvous",
    "workers.launcher.preloading",
    "workers.rank.program",
    "workers.supervisor.attempt",
    "workers.supervisor.lease",
    "workers.supervisor.program",
)


@dataclass(frozen=True)
class Order:
    """Where somebody waits for a supervisor, and with what it is started."""

    address: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str


def supervise(order: Order) -> int:
    """Be the parent of a supervisor until it ends."""
    die_with_parent()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fsencode(order.address))
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        stdin, *outputs = files
        child = forks.fork(lambda: _be_supervisor(order, outputs), stdin=stdin, keep=outputs)
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % child.pid)
        _, status = os.waitpid(child.pid, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _be_supervisor(order: Order, outputs: Iterable[int]) -> int:
    for number, file in enumerate(outputs, 1):
        os.dup2(file, number)
    forks.close_others()
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    present_as(order.command, order.environment)
    forked_ranks._begin_computing_anew(order.environment)
    folder_rendezvous.register()
    setattr(group, "_spawn", group._fork)  # noqa: B010 - all that a launcher would import is there
    return forked_ranks._run_as_main(list(order.command))
