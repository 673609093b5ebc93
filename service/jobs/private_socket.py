"""The socket of the data folder, at which the API answers commands of the folder's owner."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Self

from service.jobs.layout import DataLayout
from service.jobs.private import bind_private
from service.jobs.processes import LockedError, ProcessLock

log = logging.getLogger(__name__)


@dataclass
class PrivateSocket:
    """Keeps the data folder's socket, for commands of its owner, and the URL beside it that it stands for. Several
    processes may answer at it; the one that bound it takes it away.
    """

    bound: socket.socket
    data: DataLayout
    lock: ProcessLock | None = None
    """Absent where another process bound it."""

    @classmethod
    def bind(cls, data: DataLayout, url: str) -> Self | None:
        """Bind the socket; ``None`` where another process of this folder has it, which commands then reach."""
        try:
            lock = ProcessLock(data.api_socket.with_suffix(".lock"))
        except LockedError:
            log.warning("another process answers at %s; commands on this machine go there", data.api_socket)
            return None
        bound = bind_private(data.api_socket)
        data.api_address.write_text(url + "\n")
        return cls(bound, data, lock)

    def close(self) -> None:
        """Take both away again, where this process bound the socket; may be called twice."""
        self.bound.close()
        if self.lock is None:
            return
        if self.lock.fileno() >= 0:
            for path in (self.data.api_socket, self.data.api_address):
                path.unlink(missing_ok=True)
        self.lock.close()
