"""Closes the data folder, and the socket in it, to all but the service's user."""

from __future__ import annotations

import logging
import os
import pwd
import socket
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from service.jobs.files import DataLayout
from service.jobs.host.process_lock import LockedError, ProcessLock


class NotPrivateError(Exception):
    """A folder or file is open to other users, and cannot be closed to them from here."""


def close_to_others(folder: Path) -> bool:
    """Create ``folder`` for this user only, or remove other users' access; return whether they had any.

    From then on this process creates files for its user only. Raises :class:`NotPrivateError` for a folder of
    somebody else.
    """
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise NotPrivateError(
                f"{folder} belongs to {user(found.st_uid)}, and this is {user(os.geteuid())}: run the service as its "
                "owner, or set TRIVET_DATA to a folder of your own"
            )
        was_open = bool(found.st_mode & 0o077)
        if was_open:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return was_open


def user(number: int) -> str:
    """Return a user's name for messages, or the number if it has no name."""
    try:
        return f"user {pwd.getpwuid(number).pw_name!r}"
    except KeyError:
        return f"user {number}"


def check_owned(folder: Path, *, or_for_root: bool = False) -> None:
    """Check that only this user and root could have put a key or a socket into ``folder``. With
    ``or_for_root``, root may also use another user's folder. Raises :class:`NotPrivateError`.
    """
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0) and not (or_for_root and os.geteuid() == 0):
        raise NotPrivateError(f"{folder} belongs to {user(found.st_uid)}; files in it are not used")
    if found.st_mode & 0o022:
        raise NotPrivateError(f"other users may write to {folder}; close it to them (chmod go-w), or use another")


def read_private(path: Path) -> str | None:
    """Return the text of a file that belongs to the owner of its folder; ``None`` when there is no such file.

    Never follows a link: root, reading a key in a user's folder, must not be led to another file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != path.parent.stat().st_uid:
            return None
        return file.read().strip() or None


def socket_address(path: Path, held: ExitStack) -> str:
    """Return an address of the unix socket ``path`` within the kernel's 107 bytes. It goes through a descriptor
    of the folder, which stays open until ``held`` is closed.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}/{path.name}"


def _bind_private(path: Path) -> socket.socket:
    """Bind a unix socket that only this user may connect to, in place of one that a dead process left."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ExitStack() as held:
        bound.bind(socket_address(path, held))
    path.chmod(0o600)
    return bound


log = logging.getLogger(__name__)


@dataclass
class PrivateSocket:
    """Keeps the data folder's socket, for its owner's commands, and the file with the URL of its API.

    Several processes may answer at it; the one that bound it removes it.
    """

    bound: socket.socket
    data: DataLayout
    lock: ProcessLock | None = None
    """None if another process bound it."""

    @classmethod
    def bind(cls, data: DataLayout, url: str) -> Self | None:
        """Bind the socket; ``None`` if another process of this folder has it and answers commands."""
        try:
            lock = ProcessLock(data.api_socket.with_suffix(".lock"))
        except LockedError:
            log.warning("another process answers at %s; commands on this machine go there", data.api_socket)
            return None
        bound = _bind_private(data.api_socket)
        data.api_address.write_text(url + "\n")
        return cls(bound, data, lock)

    def close(self) -> None:
        """Remove both, if this process bound the socket; may be called twice."""
        self.bound.close()
        if self.lock is None:
            return
        if self.lock.fileno() >= 0:
            for path in (self.data.api_socket, self.data.api_address):
                path.unlink(missing_ok=True)
        self.lock.close()
