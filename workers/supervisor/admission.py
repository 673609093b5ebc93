"""Decides who may speak for a rank on a group's event socket, which every process of the service's user can reach."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from service.jobs.events import MalformedEvent
from workers.event_protocol import Greeting


@dataclass
class Admission:
    """Admits the processes of one group on this host, each for one rank."""

    secret: str
    """The ranks find it in their environment."""
    ranks: range
    """The ranks that run on this host."""
    root: int
    """The pid of the supervisor, below which all processes of its group are."""
    _speakers: dict[int, int] = field(default_factory=dict)

    def check(self, greeting: Greeting, pid: int) -> None:
        """Raise :class:`MalformedEvent` unless process ``pid``, which the kernel names, may speak for the rank.

        A process that has already ended cannot be looked at any more: its secret must do.
        """
        who = f"process {pid}, which calls itself rank {greeting.rank},"
        if not hmac.compare_digest(greeting.secret.encode(), self.secret.encode()):
            raise MalformedEvent(f"{who} does not know the secret of this group; it is ignored")
        if greeting.rank not in self.ranks:
            here = f"{self.ranks.start} to {self.ranks.stop - 1}"
            raise MalformedEvent(f"{who} is ignored: the ranks of this host are {here}")
        if not is_descendant(pid, self.root):
            raise MalformedEvent(f"{who} was not started by this group's supervisor; it is ignored")
        if self._speakers.setdefault(greeting.rank, pid) != pid:
            raise MalformedEvent(f"{who} is ignored: that rank is process {self._speakers[greeting.rank]}")


def is_descendant(pid: int, root: int) -> bool:
    """Return whether ``root`` is an ancestor of ``pid``; true if that process has ended meanwhile."""
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        pid = int(status.rpartition(")")[2].split()[1])
        if pid == root:
            return True
    return False
