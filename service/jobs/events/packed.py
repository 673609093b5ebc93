"""Packs the small record of a job that succeeded into one compressed file: each file of its own takes a block of the
disk at least. A packed file is read like one of the folder.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from service.jobs.files import Folder

if TYPE_CHECKING:
    import zipfile

PACKED = "record.zip"
_RECORDS = ("events*.jsonl", "log.rank-*.jsonl")
_MOST = 64 << 10
"""Larger records stay as they are: they are read from both ends, and in pieces."""
_MOST_PACKED = 1 << 20
"""The most bytes of a packed record, with its list of files: where ranks are not confined, one may write another."""


def pack(attempt: Folder) -> None:
    """Pack the record in the folder of an attempt to which nobody writes any more. Files are removed when the packed
    ones are on the disk, so that a death at any moment leaves each of them in one place or in both.
    """
    entries = [each for each in attempt.files() if any(fnmatch.fnmatch(each.name, form) for form in _RECORDS)]
    if not entries or sum(each.status.st_size for each in entries) > _MOST or attempt.status(PACKED) is not None:
        return
    import zipfile  # noqa: PLC0415 - most processes that import events meet no packed record

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for each in entries:
            packed.writestr(each.name, attempt.read(each.name, _MOST))
    if content.tell() > _MOST_PACKED:
        return
    attempt.write(PACKED, content.getvalue())
    for each in entries:
        attempt.unlink(each.name)


def unpack(attempt: Folder) -> None:
    """Make the folder as it was before :func:`pack`, for an attempt that is to go on. Raises :class:`OSError`."""
    for name in record_sizes(attempt):
        if attempt.status(name) is None:
            attempt.write(name, open_record(attempt, name).read())
    attempt.unlink(PACKED)


def record_sizes(attempt: Folder) -> dict[str, int]:
    """Return the sizes of the files of a record that are packed, by name. Raises :class:`OSError`."""
    if attempt.status(PACKED) is None:
        return {}
    with _opened(attempt) as packed:
        return {each.filename: each.file_size for each in packed.infolist() if each.file_size <= _MOST}


def open_record(attempt: Folder, name: str) -> IO[bytes]:
    """Open a file of a record, whether it is packed or not. Raises :class:`OSError`."""
    try:
        return attempt.reader(name)
    except FileNotFoundError:
        if name not in record_sizes(attempt):
            raise
    with _opened(attempt) as packed, packed.open(name) as file:
        if packed.getinfo(name).compress_type not in (0, 8):  # pack's: others unpack without a limit
            raise OSError(errno.EIO, "not as it was packed", str(attempt.path / PACKED))
        return io.BytesIO(file.read(_MOST))


@contextmanager
def _opened(attempt: Folder) -> Iterator[zipfile.ZipFile]:
    import zipfile  # noqa: PLC0415 - as above

    content = io.BytesIO(attempt.read(PACKED, _MOST_PACKED))
    try:
        with zipfile.ZipFile(content) as packed:
            yield packed
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:  # also for one that is encrypted
        raise OSError(errno.EIO, f"not what was packed: {error}", str(attempt.path / PACKED)) from error
