"""Reads uploaded archives: finds their members, and unpacks none before it is asked for.

A member's path is never used as a path. Sizes are known before anything is unpacked.
"""

from __future__ import annotations

import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path, PurePosixPath
from typing import IO

MOST_MEMBERS = 10_000
LARGEST_MEMBER, LARGEST_HEADER = 2**42, 2**16
"""The most bytes of a tar's member, which seeking passes over, and of an extended header, which is read whole."""
FREE, RATIO = 2**26, 4
"""Weights hardly compress: a zip may unpack to this many times its size, and to this many bytes in any case."""

FREE_COMPRESSED, RATIO_COMPRESSED = 2**24, 100
"""Texts compress well: gzip data may unpack to this many times the size of the upload, and to this many bytes
in any case. All members of an archive count together.
"""
LARGEST_UNPACKED = 2**34
"""The most bytes that an upload of any size may unpack to."""

_GZIP = b"\x1f\x8b"
OF_ZIP, OF_PICKLE = b"PK\x03\x04", b"\x80"
_TAR = (b"ustar", 257)
"""What a tar has, and where."""
_CHUNK = 2**20
_PLAIN_MODES = (0, stat.S_IFREG, stat.S_IFDIR)
"""What a zip's member may be: archivers of other systems than Unix say nothing."""


class UploadError(ValueError):
    """An uploaded file is not of the expected kind."""


class ArchiveError(UploadError):
    """The file is no archive, or not one of the expected kind."""


class _CheckedTarInfo(tarfile.TarInfo):
    """A member whose size is never negative: a negative one would be followed in circles for ever."""

    EXTENDING = (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
    _size = 0
    _type = tarfile.REGTYPE

    # Properties, since which methods read a header differs between versions of Python; all set these two.
    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        """Check the size, which the base class sets from a header, and again from a header that extends it."""
        if not 0 <= value <= LARGEST_MEMBER:
            raise tarfile.ReadError(f"a member has the size {value}; expected 0 to {LARGEST_MEMBER}")
        self._size = value
        self._check_extension()

    def _get_type(self) -> bytes:
        return self._type

    def _set_type(self, value: bytes) -> None:
        self._type = value
        self._check_extension()

    type = property(_get_type, _set_type)

    def _check_extension(self) -> None:
        """Check a header that extends the next one: it is read whole."""
        if self._type in self.EXTENDING and self._size > LARGEST_HEADER:
            raise tarfile.ReadError(f"a header has the size {self._size}; expected {LARGEST_HEADER} at most")


DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, RuntimeError, EOFError, ValueError)
"""The errors of the two libraries on a broken archive, beside an ``OSError`` without a number."""


@dataclass(frozen=True)
class ArchiveMember:
    """A regular file in an archive. ``name`` is without folders."""

    path: PurePosixPath
    size: int
    open: Callable[[], IO[bytes]]

    @property
    def name(self) -> str:
        return self.path.name


class Unpacking:
    """A limit on the gzip data in an upload of so many bytes: how much was unpacked, and how much may be."""

    def __init__(self, upload_bytes: int) -> None:
        self._most = min(max(FREE_COMPRESSED, RATIO_COMPRESSED * upload_bytes), LARGEST_UNPACKED)
        self._upload_bytes = upload_bytes
        self._counted: dict[str, int] = {}

    def read(self, data: bytes, name: str, most: int) -> bytes:
        """Return the data, decompressed if gzip compressed it; at most one byte more than ``most``.

        Unpacking ends as soon as a limit is passed. Raises :class:`UploadError` if all data read from the
        upload, each ``name`` once, exceed the limit, and if the data are damaged.
        """
        if not data.startswith(_GZIP):
            return data
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as content:
                found = self._unpacked(content, name, most)
        except (OSError, EOFError, zlib.error) as error:
            raise UploadError(f"{name} is damaged: {error}") from error
        self._counted[name] = len(found)
        return found

    def _unpacked(self, content: gzip.GzipFile, name: str, most: int) -> bytes:
        others = sum(size for known, size in self._counted.items() if known != name)
        found = bytearray()
        while len(found) <= most and (chunk := content.read(min(_CHUNK, most + 1 - len(found)))):
            found += chunk
            if others + len(found) > self._most:
                raise UploadError(
                    f"{name} makes the upload of {self._upload_bytes} bytes unpack to more than {self._most}; expected "
                    f"at most {RATIO_COMPRESSED} times as many as it has, or {FREE_COMPRESSED}"
                )
        return bytes(found)


def is_archive(path: Path) -> bool:
    """Return whether a file begins as a zip or a tar does."""
    with path.open("rb") as content:
        head = content.read(_TAR[1] + len(_TAR[0]))
    return head.startswith(OF_ZIP) or head[_TAR[1] :] == _TAR[0]


@contextmanager
def opened(archive: Path, of: str) -> Iterator[list[ArchiveMember]]:
    """Return all regular files; ``of`` names the expected ones, for a message.

    While it is open, errors of a broken archive become :class:`ArchiveError`.
    """
    try:
        with damage():
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as zipped:
                    yield _of_zip(zipped, archive.stat().st_size)
            else:
                # Uncompressed only: the sizes in a compressed one are known only after it has been unpacked.
                with tarfile.open(archive, "r:", tarinfo=_CheckedTarInfo) as tar:
                    yield _of_tar(tar)
    except tarfile.ReadError as error:
        raise ArchiveError(f"expected a zip or an uncompressed tar of {of}: {error}") from error


def first_odd_member(archive: Path) -> str | None:
    """Return the first member that is neither a regular file nor a folder: a link, a device, a pipe, a sparse file.

    Raises :class:`ArchiveError` as :func:`opened` does, which leaves such members out.
    """
    with damage():
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                modes = ((entry.filename, entry.external_attr >> 16) for entry in zipped.infolist())
                return next((name for name, mode in modes if stat.S_IFMT(mode) not in _PLAIN_MODES), None)
        with tarfile.open(archive, "r:", tarinfo=_CheckedTarInfo) as tar:
            return next((entry.name for entry in tar if entry.issparse() or not (entry.isreg() or entry.isdir())), None)


@contextmanager
def members_of_zip(content: bytes) -> Iterator[list[ArchiveMember]]:
    """Return all regular files of a zip that is in memory. Raises :class:`ArchiveError`, also while it is open."""
    with damage(), zipfile.ZipFile(io.BytesIO(content)) as zipped:
        yield _of_zip(zipped, len(content))


@contextmanager
def damage() -> Iterator[None]:
    """Turn the two libraries' errors on a broken archive into an :class:`ArchiveError`."""
    try:
        yield
    except (UploadError, tarfile.ReadError):
        raise
    except OSError as error:
        # bzip2 reports damage without a number, and a place that leads nowhere is EINVAL; others are the machine's.
        if error.errno not in (None, EINVAL):
            raise
        raise ArchiveError(f"the archive is damaged: {error}") from error
    except DAMAGE as error:
        raise ArchiveError(f"the archive is damaged: {error}") from error


def _of_zip(opened: zipfile.ZipFile, size: int) -> list[ArchiveMember]:
    _check_count(len(opened.infolist()))
    entries = [entry for entry in opened.infolist() if not entry.is_dir()]
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > max(FREE, RATIO * size):
        raise ArchiveError(f"the archive of {size} bytes unpacks to {unpacked}, more than {RATIO} times as many")
    return [_zip_member(opened, entry) for entry in entries]


def _zip_member(opened: zipfile.ZipFile, entry: zipfile.ZipInfo) -> ArchiveMember:
    return ArchiveMember(PurePosixPath(entry.filename), entry.file_size, lambda: opened.open(entry))


def _of_tar(tar: tarfile.TarFile) -> list[ArchiveMember]:
    members = []
    for count, entry in enumerate(tar, 1):
        _check_count(count)
        if entry.isreg() and not entry.issparse():
            members.append(_tar_member(tar, entry))
    return members


def _check_count(members: int) -> None:
    if members > MOST_MEMBERS:
        raise ArchiveError(f"the archive has more than {MOST_MEMBERS} members")


def _tar_member(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> ArchiveMember:
    def extract() -> IO[bytes]:
        content = tar.extractfile(entry)
        if content is None:
            raise ArchiveError(f"{entry.name} is not a regular file")
        return content

    return ArchiveMember(PurePosixPath(entry.name), entry.size, extract)
