"""Files that are whole after any crash: other processes, and the next start, see the old content or the new one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content in one step that also survives a loss of power.

    The bytes reach the disk before the name does: a rename that overtakes them would leave an empty file. Several
    processes may write the same file; one of them wins. A failed write leaves no draft behind.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush(path.parent)


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be read, so that it does no more harm and can be looked at; return its new path."""
    aside = path.with_name(f"{path.name}.unreadable")
    path.replace(aside)
    return aside


def flush(path: Path) -> None:
    """Force a file or folder to disk: a rename is only a promise about contents that are there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
