"""Reads uploaded archives, and those of a Llama-style checkpoint: decides which members count, and unpacks no others.

A member's path is never used as a path. Sizes are known before anything is unpacked.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path, PurePosixPath
from typing import IO

_WRAPPERS = ("module.", "_orig_mod.")
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
LARGEST_CONFIG = 2**20
"""The most bytes of a configuration."""
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
_ZIP = b"PK\x03\x04"
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
    return head.startswith(_ZIP) or head[_TAR[1] :] == _TAR[0]


def read_text(archive: Path, name: str) -> bytes:
    """Return the content of ``config.json``, or of another small member. Raises :class:`ArchiveError`."""
    with _checkpoint(archive) as members:
        if name not in members:
            raise ArchiveError(f"the archive has no {name} beside {', '.join(sorted(members))}")
        return _read(members[name])


def weight_files(names: Collection[str], index: Callable[[], bytes]) -> dict[str, frozenset[str]]:
    """Return the files of a checkpoint that hold its weights: those that its index names, else ``model.safetensors``,
    else all; each with the names of the tensors that the index places in another file, of which it may hold a stale
    copy. Raises :class:`ArchiveError` for an index that names other files.
    """
    if INDEX not in names:
        every = sorted(name for name in names if name.endswith(".safetensors"))
        return dict.fromkeys([SINGLE] if SINGLE in names else every, frozenset())
    try:
        # Names come from the archive: only files beside the index count.
        placed = {tensor: PurePosixPath(str(name)).name for tensor, name in json.loads(index())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{INDEX} has no weight_map of names: {error!r}") from error
    shards = sorted(set(placed.values()))
    if missing := [name for name in shards if name not in names]:
        raise ArchiveError(f"{INDEX} names {missing[0]}, which the archive does not have")
    return {shard: frozenset(tensor for tensor, name in placed.items() if name != shard) for shard in shards}


def unwrapped(name: str) -> str:
    """Return the name of a tensor without the prefixes of wrappers: DistributedDataParallel's at the front,
    those of compiled modules in their place.
    """
    while name.startswith(_WRAPPERS):
        name = name.removeprefix(_WRAPPERS[0]).removeprefix(_WRAPPERS[1])
    return name.replace(f".{_WRAPPERS[1]}", ".")


def read_shapes(archive: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their :func:`unwrapped` names, from the headers of the files that hold the
    weights. Raises :class:`ArchiveError`.
    """
    found: dict[str, tuple[int, ...]] = {}
    with _checkpoint(archive) as members:
        files = weight_files(members, lambda: _read(members[INDEX]))
        if not files:
            raise ArchiveError(f"the archive has no .safetensors file beside {CONFIG}")
        for name, elsewhere in files.items():
            held = {tensor: shape for tensor, shape in _shapes(members[name]).items() if tensor not in elsewhere}
            shapes = {unwrapped(each): shape for each, shape in held.items()}
            if len(shapes) < len(held):
                raise ArchiveError(f"{name} has a tensor twice, with and without a prefix of {' or '.join(_WRAPPERS)}")
            if doubled := found.keys() & shapes.keys():
                raise ArchiveError(f"{min(doubled)} is in several files, and no {INDEX} says which one counts")
            found |= shapes
    return found


def _shapes(member: ArchiveMember) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file from its header. Raises :class:`ArchiveError`."""
    try:
        with member.open() as content:
            return shapes_in(content, member.size)
    except TensorHeaderError as error:
        raise ArchiveError(f"{member.name} {error}") from error


def unpack(archive: Path, folder: Path) -> None:
    """Put configuration, index and safetensors files into the new ``folder``. Raises :class:`ArchiveError`."""
    with _checkpoint(archive) as members:
        if not any(name.endswith(".safetensors") for name in members):
            raise ArchiveError(f"the archive has no .safetensors file beside {CONFIG}")
        folder.mkdir()
        for name, member in members.items():
            with member.open() as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)


@contextmanager
def _checkpoint(archive: Path) -> Iterator[dict[str, ArchiveMember]]:
    """Return the members that count by name: those beside the ``config.json`` that is nearest to the top."""
    with opened(archive, f"{CONFIG} and safetensors files") as members:
        configs = [member for member in members if member.name == CONFIG]
        if not configs:
            raise ArchiveError(f"the archive has no {CONFIG}")
        home = min(configs, key=lambda member: len(member.path.parts)).path.parent
        yield {member.name: member for member in members if member.path.parent == home and _counts(member.name)}


def _counts(name: str) -> bool:
    return name in (CONFIG, INDEX) or name.endswith(".safetensors")


def _read(member: ArchiveMember) -> bytes:
    if member.size > LARGEST_CONFIG:
        raise ArchiveError(f"{member.name} has {member.size} bytes; at most {LARGEST_CONFIG} are expected")
    with member.open() as content:
        return content.read(LARGEST_CONFIG)


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


LARGEST = 2**25
"""The most bytes of a header."""
_ABOUT = "__metadata__"
OF_PICKLE = b"\x80"
_OF_TORCH = (_ZIP, OF_PICKLE)
"""The first bytes of a file of ``torch.save``: a zip file, or a pickle."""


class TensorHeaderError(ValueError):
    """The file is no safetensors file; the message is the end of a sentence about it."""


_COUNT = ((), "I64")


class TensorTypeError(TensorHeaderError):
    """A tensor is of a type that weights do not have."""


FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def shapes_in(content: IO[bytes], size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a file by name. ``content`` is at its beginning, ``size`` is in bytes.

    Raises :class:`TensorHeaderError`, also for tensors that are neither floating-point numbers nor a count, as of the
    batches in a running statistic.
    """
    head = content.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(LARGEST, size - 8):
        if head.startswith(_OF_TORCH):
            raise TensorHeaderError("is a file of torch.save (.pt, .pt2), not of safetensors")
        raise TensorHeaderError(f"is no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(content.read(length))
        held = {
            name: (tuple(map(int, each["shape"])), each["dtype"]) for name, each in header.items() if name != _ABOUT
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorHeaderError(f"is no safetensors file: {error!r}") from error
    for name, (shape, kind) in held.items():
        if kind not in FLOATS and (shape, kind) != _COUNT:
            raise TensorTypeError(f"has {name!r} of the type {kind}; expected one of {', '.join(FLOATS)}")
    return {name: shape for name, (shape, _) in held.items()}
