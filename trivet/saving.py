"""Writes what is downloaded: into a file that appears complete or not at all, or to what is no file."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR, ENOENT
from pathlib import Path
from typing import IO

_NOT_OURS = (Path("/dev"), Path("/proc"))
"""Below these a file is another process's open one: it is written to, and keeps its place."""


@contextmanager
def writing(target: Path) -> Iterator[IO[bytes]]:
    """Open ``target`` to be written to. A file, also one that a link leads to, is replaced when all is written, and
    only then; a device, a pipe or a socket is written to as it is.
    """
    if target.is_dir():
        raise IsADirectoryError(EISDIR, "it is a folder, where a file is wanted", str(target))
    if is_written_in_place(target):
        with target.open("wb") as opened:
            yield opened
        return
    real = Path(os.path.realpath(target))
    if not real.parent.is_dir():
        raise FileNotFoundError(ENOENT, "there is no such folder", str(real.parent))
    partial = real.with_name(f".{real.name}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(real)
    finally:
        partial.unlink(missing_ok=True)


def is_written_in_place(target: Path) -> bool:
    """Return whether there is something that is not to be replaced: what it has taken stays written."""
    if not target.exists():
        return False
    return not target.is_file() or any(target.absolute().is_relative_to(folder) for folder in _NOT_OURS)
