"""A folder as an uncompressed tar archive, written while it is sent."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 20


def stream(folder: Path) -> Iterator[bytes]:
    """Yield the regular files below ``folder``, in order of their names, under the folder's own name.

    Links are left out. A file that shrinks meanwhile ends the stream with :class:`OSError`: the archive is then not
    complete, and its reader sees the connection break.
    """
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            member = tarfile.TarInfo((Path(folder.name) / path.relative_to(folder)).as_posix())
            member.size, member.mtime, member.mode = status.st_size, int(status.st_mtime), 0o644
            yield member.tobuf(tarfile.PAX_FORMAT)
            yield from _content(path, member.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _content(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        left = size
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise OSError(f"{path} became shorter while it was read")
            left -= len(chunk)
            yield chunk
    yield bytes(-size % tarfile.BLOCKSIZE)
