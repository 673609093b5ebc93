"""Files that are whole after any crash: other processes, and the next start, see the old content or the new one."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def atomic_write(path: Path, content: bytes) -> None:
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


@contextmanager
def atomic_draft(path: Path) -> Iterator[Path]:
    """Yield where to write a large file, or a folder, that appears at ``path`` when the block ends without an error.

    It takes the place of an older one. Only one process at a time may do this; it overwrites the draft of a killed one,
    so that drafts do not pile up.
    """
    draft = path.with_name(f".{path.name}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    _remove(draft)
    yield draft
    if draft.is_dir():
        _remove(path)
    draft.replace(path)


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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
