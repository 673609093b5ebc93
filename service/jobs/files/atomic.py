"""Writes files that are whole after any crash: other processes, and the next start, see the old content or the new
one.
"""

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
    """Yield a draft path for a large file or a folder, which appears at ``path`` when the block ends without an error.

    It replaces an older one. Only one process at a time may do this; it overwrites a killed process's draft, so
    that drafts do not accumulate.
    """
    draft = path.with_name(f".{path.name}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    _remove(draft)
    yield draft
    if draft.is_dir():
        _remove(path)
    draft.replace(path)


def set_aside(path: Path) -> Path:
    """Rename an unreadable file, so that it does no more harm and can be examined; return its new path."""
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
