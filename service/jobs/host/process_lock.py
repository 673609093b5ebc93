"""A lock between processes, which the kernel releases."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class LockedError(Exception):
    """Another process holds the lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is locked by another process")


class ProcessLock:
    """An exclusive lock on a file, which is shared by the children that inherit its descriptor.

    The kernel releases it when the last of them has ended, however it ended. So a child that is started with
    ``pass_fds=(lock.fileno(),)`` keeps the lock when its parent is killed, and ``holders`` finds it.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock at once. Raises :class:`LockedError` when another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise LockedError(path) from None

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Release the lock; children that inherited the descriptor still hold it. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
