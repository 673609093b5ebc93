"""Makes the private folder in which launchers and ranks of an attempt meet: writing there proves membership.

Torch's own rendezvous listens on every interface, authenticates no client, and unpickles its messages.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

VARIABLE = "TRIVET_RENDEZVOUS"
"""The environment variable that names the folder to a rank."""
LAUNCHERS, RANKS = "launchers", "ranks"
"""Files in it: the stores (``torch.distributed.FileStore``) of the launchers and of the ranks."""
_SECRET = "secret"  # noqa: S105 - the name of a file


class RendezvousError(RuntimeError):
    """The folder cannot be trusted, or a process outside the group sent something."""


def make(folder: Path) -> Path:
    """Create the folder with a new secret in it; it is never visible without one. An older one is replaced."""
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    draft.mkdir(mode=0o700)
    handle = os.open(draft / _SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return folder


def check(folder: Path) -> Path:
    """Return the folder if it is a real folder that only this process's user may enter; else raise
    :class:`RendezvousError`.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise RendezvousError(
            f"{folder} has mode {stat.filemode(found.st_mode)} and owner {found.st_uid}; "
            f"expected a folder of user {os.geteuid()} with mode drwx------"
        )
    return folder


def secret(folder: Path) -> bytes:
    return bytes.fromhex((check(folder) / _SECRET).read_text())
