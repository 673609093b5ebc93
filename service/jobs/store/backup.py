"""Backs this machine's service up into one file while it runs, and restores it elsewhere.

The broker's snapshot is of one moment, and is written first; files are read after it. So each file that a record names
is there, unless it was deleted meanwhile, and a file may be newer than its record: a job then goes on from a newer
checkpoint, and its next attempt relays what the stream lacks.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from pydantic import BaseModel

from service.jobs.events import PACKED
from service.jobs.files import DataLayout, Folder, UnsafePathError, flush
from service.jobs.host import close_to_others
from service.jobs.host.embedded_broker import EmbeddedBroker, Fsync
from service.jobs.store import Store
from service.jobs.store.snapshot import put_in_place, write_snapshot

_FORMAT = 1
_SNAPSHOT, _MANIFEST, _DATA = "broker.rdb", "manifest.json", "data"
_KEPT = ("jobs", "files", "audit", "admin.key")
"""The parts of the data folder that are backed up; the rest belongs to one machine, or is made again."""
_CHUNK = 1 << 20
_OF_JOBS = "jobs/"
_LONGEST_NAME = 2048
"""Most bytes of a name below the data folder; a longer one might not fit into another folder."""
_REFUSALS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


class BackupError(Exception):
    """A backup cannot be made, read, or restored here."""


@dataclass(frozen=True)
class BackupSummary:
    """The contents of a backup."""

    files: int
    bytes: int
    vanished: tuple[str, ...] = ()
    """Files that were deleted while the backup was made, such as those of older checkpoints."""
    unusable: tuple[str, ...] = ()
    """Files of jobs that are missing from it or incomplete: their names cannot be restored, they may not be
    read, or a job cut them short while they were read.
    """
    queued: tuple[str, ...] = ()
    """Jobs that ran when the backup was made and were queued again by its restoration."""


class _Manifest(BaseModel):
    """The manifest, which is written last, so that a backup without it is known to be cut short."""

    format: int
    members: dict[str, Any] = {}


@dataclass
class _Contents:
    """Size and SHA-256 of each member, which the manifest lists."""

    members: dict[str, tuple[int, str]] = field(default_factory=dict)

    def manifest(self) -> bytes:
        return json.dumps({"format": _FORMAT, "members": self.members}).encode()

    def summary(self, vanished: list[str], unusable: list[str]) -> BackupSummary:
        sizes = [size for size, _ in self.members.values()]
        return BackupSummary(len(sizes), sum(sizes), tuple(vanished), tuple(unusable))


class _HashingReader(io.RawIOBase):
    """Reads a number of bytes of a file, and hashes them; zeros replace those that it ``lacks`` because it became
    shorter.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.digest = hashlib.sha256()
        self.lacks = 0
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        if lacks := max(0, size - len(content)):
            self.lacks += lacks
            content += bytes(lacks)
        self.digest.update(content)
        return content


def make(layout: DataLayout, store: Store, target: Path) -> BackupSummary:
    """Write a backup of the service whose data is in ``layout`` to ``target``, which appears only when it is
    complete, readable only by its owner. Raises :class:`BackupError`, and :class:`StoreUnavailable`.
    """
    if target.exists():
        raise BackupError(f"{target} exists already; name a new file")
    draft = target.with_name(f".{target.name}.part")
    contents = _Contents()
    snapshot = write_snapshot(store.client, layout.broker)
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                vanished, unusable = _fill(tar, snapshot, layout, contents)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(target)
        flush(target.parent)
    finally:
        draft.unlink(missing_ok=True)
        snapshot.unlink(missing_ok=True)
    return contents.summary(vanished, unusable)


def _fill(tar: tarfile.TarFile, snapshot: Path, layout: DataLayout, contents: _Contents) -> tuple[list[str], list[str]]:
    """Write every member, the manifest last. Return the names of files that vanished, and of unusable files of
    jobs: no job prevents the backup of the others.
    """
    vanished, unusable = [], []
    with snapshot.open("rb") as file:
        _add(tar, file, _SNAPSHOT, contents)
    with Folder.open(layout.root.resolve()) as data:
        for path in chain(_files(data), _packed_since(data, contents)):
            name, of_jobs = f"{_DATA}/{path}", path.startswith(_OF_JOBS)
            try:
                with data.reader(_name_member(path)) as file:
                    whole = _add(tar, file, name, contents)
            except (FileNotFoundError, UnsafePathError):
                vanished.append(name)
            except OSError as error:
                if not of_jobs or error.errno not in _REFUSALS:
                    raise
                unusable.append(_printable(name))
            else:
                if not whole and not of_jobs:
                    raise BackupError(f"{name} became shorter while it was read; make the backup again")
                unusable += [] if whole else [name]
    vanished = [name for name in vanished if _packed(name) not in contents.members]
    manifest = tarfile.TarInfo(_MANIFEST)
    manifest.size = len(text := contents.manifest())
    tar.addfile(manifest, io.BytesIO(text))
    return vanished, unusable


def _packed_since(data: Folder, contents: _Contents) -> Iterator[str]:
    """Yield records that were packed after their folders were listed: the files in them may have been missed."""
    for path in _files(data):
        if (name := f"{_DATA}/{path}") not in contents.members and name == _packed(
            str(Path(name).with_suffix(".jsonl"))
        ):
            yield path


def _packed(name: str) -> str:
    """Return the member that has a file of an attempt's record once it is packed; empty for other files."""
    path = PurePosixPath(name)
    return str(path.with_name(PACKED)) if path.suffix == ".jsonl" and path.parts[-3:-2] == ("attempts",) else ""


def _name_member(path: str) -> str:
    """Return a path as a member's name. Raises :class:`OSError` if it is not text, or too long."""
    if _printable(path) != path or len(path.encode()) > _LONGEST_NAME:
        raise OSError(errno.ENAMETOOLONG, "no name that could be restored", _printable(path))
    return path


def _printable(path: str) -> str:
    """Return a path as text: a file's name may be any bytes."""
    return path.encode(errors="replace").decode()


def _files(data: Folder) -> Iterator[str]:
    """Yield the regular files to keep; links and sockets belong to this machine."""
    for kept in _KEPT:
        found = data.status(kept)
        if found is not None and stat.S_ISREG(found.st_mode):
            yield kept
        elif found is not None and stat.S_ISDIR(found.st_mode):
            with data.folder(kept) as folder:
                yield from (each.name for each in folder.files(f"{kept}/"))


def _add(tar: tarfile.TarFile, file: BinaryIO, name: str, contents: _Contents) -> bool:
    """Write a member; return whether it holds the whole file."""
    found = os.fstat(file.fileno())
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = found.st_size, int(found.st_mtime), found.st_mode & 0o700
    reader = _HashingReader(file)
    tar.addfile(member, reader)
    contents.members[name] = (member.size, reader.digest.hexdigest())
    return not reader.lacks


def restore(source: Path, layout: DataLayout, fsync: Fsync) -> BackupSummary:
    """Restore a backup into a data folder that is empty or absent, so that ``trivet up`` continues there.
    Running jobs are queued again. Raises :class:`BackupError`; the folder is then unchanged.
    """
    if layout.root.exists() and (layout.root.is_file() or any(layout.root.iterdir())):
        raise BackupError(f"{layout.root} is not empty: restore into a new folder, by TRIVET_DATA")
    close_to_others(layout.root)
    try:
        summary = _extract(source, layout)
        with EmbeddedBroker.start(layout.broker, fsync=fsync) as broker:
            store = Store.connect(broker.url, layout)
            try:
                queued = store.attempts.settle_restored()
            finally:
                store.close()
    except BaseException:
        shutil.rmtree(layout.root, ignore_errors=True)
        raise
    return BackupSummary(summary.files, summary.bytes, queued=tuple(queued))


def _extract(source: Path, layout: DataLayout) -> BackupSummary:
    contents, manifest = _Contents(), None
    try:
        with tarfile.open(source, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise BackupError(f"{source} is no backup of Trivet: {member.name!r} is no regular file")
                if member.name == _MANIFEST:
                    manifest = _Manifest.model_validate_json(content.read())
                    continue
                contents.members[member.name] = _write(content, _place_of(member.name, layout), member)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise BackupError(f"{source} is no backup of Trivet, or is damaged: {error}") from error
    if manifest is None:
        raise BackupError(f"{source} is cut short: it has no manifest")
    if manifest.format != _FORMAT:
        raise BackupError(f"{source} has format {manifest.format}; this version of Trivet reads {_FORMAT}")
    found = {name: list(told) for name, told in contents.members.items()}
    if wrong := sorted(name for name in manifest.members.keys() | found.keys()
                       if manifest.members.get(name) != found.get(name)):  # fmt: skip
        raise BackupError(f"{source} is damaged: {wrong[0]!r} is not what the manifest says")
    put_in_place(layout.root / _SNAPSHOT, layout.broker)
    return contents.summary([], [])


def _place_of(name: str, layout: DataLayout) -> Path:
    """Return a member's path. Raises :class:`BackupError` if it would be outside the folder."""
    parts = PurePosixPath(name).parts
    if name == _SNAPSHOT:
        return layout.root / _SNAPSHOT
    if len(parts) < 2 or parts[0] != _DATA or parts[1] not in _KEPT or ".." in parts:
        raise BackupError(f"{name!r} is no member of a backup of Trivet")
    return layout.root.joinpath(*parts[1:])


def _write(content: IO[bytes], path: Path, member: tarfile.TarInfo) -> tuple[int, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
            size += file.write(chunk)
    path.chmod(member.mode & 0o700)
    os.utime(path, (member.mtime, member.mtime))
    return size, digest.hexdigest()
