"""Recognises a full disk and reports it in one form."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from service.causes import causes

DISK_FULL = "DiskFull"
"""The type of a job's error when a disk is full."""

_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS = ("no space left on device", "disk quota exceeded")
_NOTHING = 1 << 16
_TORCH = "PytorchStreamWriter failed"
"""Torch's message for any failed write, without its reason."""


def full_disk(error: BaseException, folder: Path) -> str | None:
    """Return a message with path and free bytes if ``error``, or its cause, is about a full disk; else None.

    ``folder`` is where the failed program writes, for errors that do not name a file.
    """
    for cause in causes(error):
        if _is_full(cause, folder):
            named = isinstance(cause, OSError) and isinstance(cause.filename, str)
            path = Path(cause.filename) if named else folder  # type: ignore[attr-defined]
            return f"no space left on the disk of {path}: {free_bytes(path)} bytes are free"
    return None


def _is_full(error: BaseException, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    text = str(error)
    if any(words in text.lower() for words in _WORDS):
        return True
    return _TORCH in text and free_bytes(folder) < _NOTHING


def free_bytes(path: Path) -> int:
    """Return the bytes for this user on the disk of ``path``, or of the closest folder above it that exists; 0 if
    unknown.
    """
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0
