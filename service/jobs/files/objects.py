"""Keeps files in an object store, for hosts that share no folder.

An object holds bytes under their SHA-256, and a *tree* is a set of named files: a manifest, written last, says which
objects they are. So a half-written object has no name, and a reader checks the content against the hash that names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import ValidationError

from service.jobs.files.layout import DataLayout
from service.jobs.files.safe_files import Folder
from service.jobs.records import FrozenModel

PUBLISHED = "published"
"""The folder of published files, below their job's."""
_UPLOADS = "uploads"
_CHUNK = 8 << 20
_MANIFEST = "manifest.json"
_OF_CHECKPOINT = re.compile(r"checkpoints/step_(\d{1,18})/", re.ASCII)


Chunk = bytes
"""Some bytes of a file; an alias, since records here have a field named ``bytes``."""


class ObjectStoreError(OSError):
    """A call of the object store failed; the message says which."""


class StoredObject(FrozenModel):
    """The place of a file's content, below the folder of its owner."""

    path: str
    sha256: str
    bytes: int


class TreeManifest(FrozenModel):
    """The files of a tree. ``host`` wrote it, and has them in its own folder."""

    host: str = ""
    files: dict[str, StoredObject]


@dataclass(frozen=True)
class RemoteFile:
    """A file in an object store, whose content was hashed before it was stored."""

    store: ObjectStore
    path: str
    sha256: str
    bytes: int

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[Chunk]:
        """Yield the bytes from ``start`` to before ``end``. Raises :class:`ObjectStoreError`; for a whole file
        also if its hash is wrong, which is checked before its last chunk is yielded.
        """
        end = self.bytes if end is None else end
        digest, held = hashlib.sha256(), b""
        for at in range(start, end, _CHUNK):
            yield held
            held = self.store.read(self.path, at, min(at + _CHUNK, end))
            if len(held) != min(_CHUNK, end - at):
                raise ObjectStoreError(f"{self.path} is shorter than its {self.bytes} bytes")
            digest.update(held)
        if (start, end) == (0, self.bytes) and digest.hexdigest() != self.sha256:
            raise ObjectStoreError(f"{self.path} does not have the SHA-256 of the stored file")
        yield held

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Yield the open file once all of it has been fetched and checked."""
        with tempfile.TemporaryFile() as file:
            for chunk in self.chunks():
                file.write(chunk)
            file.seek(0)
            yield cast(BinaryIO, file)


@dataclass(frozen=True)
class RemoteFolder:
    """The files of a folder in an object store, by their paths below it."""

    name: str
    files: dict[str, RemoteFile]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True)
class ObjectStore:
    """A folder of an object store, by any URL of fsspec, such as ``s3://bucket/prefix``; it connects with its first
    call. Names are relative to it. Every call may raise :class:`OSError`.
    """

    url: str

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it. It is made in the process that uses it: it has a thread."""
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra, which takes half a second

            system, path = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ObjectStoreError(f"{self.url}: {error}; install trivet[store], or fsspec's package for it") from error
        return system, path.rstrip("/")

    def try_out(self) -> None:
        """Write, read and remove an object. Raises :class:`ObjectStoreError` with the setting to change."""
        name, content = f"tried/{uuid.uuid4().hex}", b"trivet"
        try:
            self._write(name, content)
            read = self.read(name, 0, len(content))
            self.remove(name)
        except OSError as error:
            raise ObjectStoreError(f"TRIVET_STORE={self.url} cannot be used: {error}") from error
        if read != content:
            raise ObjectStoreError(f"TRIVET_STORE={self.url} returns other bytes than were stored there")

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        with _name_object_in_errors(path):
            content: bytes = self._system.cat_file(self._full(path), start=start, end=end)
        return content

    def size(self, path: str) -> int:
        """Return how many bytes an object has."""
        with _name_object_in_errors(path):
            return int(self._system.info(self._full(path))["size"])

    def put(self, owner: str, folder: str, file: BinaryIO) -> StoredObject:
        """Store the present content of an open file below ``owner/folder``, unless it is stored or published."""
        size = os.fstat(file.fileno()).st_size
        digest = _digest(file, size)
        for place in {PUBLISHED, folder}:
            if self._has(_join_path(owner, place, digest), size):
                return StoredObject(path=f"{place}/{digest}", sha256=digest, bytes=size)
        file.seek(0)
        self._upload(_join_path(owner, folder, digest), file, size, digest)
        return StoredObject(path=f"{folder}/{digest}", sha256=digest, bytes=size)

    def fetch(self, file: RemoteFile, root: Folder, name: str) -> None:
        """Fetch a file into an open folder, in one step and checked; a file that already has the content stays."""
        *above, last = name.split("/")
        with root.make("/".join(above)) if above else contextlib.nullcontext(root) as folder:
            if _is_there(file, folder, last):
                return
            with folder.replacing(last) as target:
                target.writelines(file.chunks())

    def file(self, owner: str, stored: StoredObject) -> RemoteFile:
        return RemoteFile(self, f"{owner}/{stored.path}", stored.sha256, stored.bytes)

    def name_files(self, owner: str, tree: str, manifest: TreeManifest) -> None:
        """Make a tree consist of stored objects; delete objects that only the former tree had."""
        before = self.manifest(owner, tree)
        self._write(f"{owner}/{tree}/{_MANIFEST}", manifest.model_dump_json().encode())
        named = {stored.path for stored in manifest.files.values()}
        for stored in before.files.values() if before else ():
            if stored.path not in named and stored.path.startswith(f"{tree}/"):
                self.remove(f"{owner}/{stored.path}")

    def manifest(self, owner: str, tree: str) -> TreeManifest | None:
        try:
            return TreeManifest.model_validate_json(self.read(f"{owner}/{tree}/{_MANIFEST}"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ObjectStoreError(f"{owner}/{tree}/{_MANIFEST} is not of this version: {error}") from error

    def tree(self, owner: str, manifest: TreeManifest, prefix: str = "") -> RemoteFolder:
        """Return the files of a tree whose names begin with a prefix, without that."""
        found = {name: self.file(owner, each) for name, each in manifest.files.items() if name.startswith(prefix)}
        files = {name.removeprefix(prefix): file for name, file in found.items()}
        return RemoteFolder(Path(prefix or owner).name, files)

    def numbers(self, folder: str) -> list[int]:
        """Return the folders below one that are numbers, the largest first."""
        try:
            with _name_object_in_errors(folder):
                found = self._system.ls(self._full(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def remove(self, path: str) -> None:
        """Remove an object, or everything below a path, if it exists."""
        with contextlib.suppress(FileNotFoundError), _name_object_in_errors(path):
            self._system.rm(self._full(path), recursive=True)

    @property
    def _system(self) -> Any:
        return self._place[0]

    def _full(self, path: str) -> str:
        return f"{self._place[1]}/{path}"

    def _has(self, path: str, size: int) -> bool:
        try:
            return self.size(path) == size
        except FileNotFoundError:
            return False

    def _write(self, path: str, content: bytes) -> None:
        with _name_object_in_errors(path):
            self._make_folder(path)
            self._system.pipe_file(self._full(path), content)

    def _upload(self, path: str, file: BinaryIO, size: int, digest: str) -> None:
        with _name_object_in_errors(path):
            self._make_folder(path)
            with self._system.open(self._full(path), "wb") as target:
                written = _digest(file, size, target)
        if written != digest:
            self.remove(path)
            raise ObjectStoreError(f"{path}: the file was written to while it was stored")

    def _make_folder(self, path: str) -> None:
        if "file" in self._system.protocol:
            self._system.makedirs(self._full(path).rpartition("/")[0], exist_ok=True)


def job_files(job_id: str) -> str:
    """Return the folder of all stored objects of a job, which is deleted with it."""
    return f"jobs/{job_id}"


def state_tree(attempt: int) -> str:
    """Return the tree of files from which the next attempt continues. Each attempt writes its own, so an
    attempt that was given up cannot harm the next.
    """
    return f"attempts/{attempt}"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file of a job is part of, by its path below the job's folder."""
    found = _OF_CHECKPOINT.match(name)
    return None if found is None else int(found[1])


def record_tree(attempt: int) -> str:
    """Return the tree of an attempt's reports and output."""
    return f"records/{attempt}"


def folder_tree(name: str) -> str:
    """Return the tree of an artifact that is a folder."""
    return f"folders/{hashlib.sha256(name.encode()).hexdigest()}"


def newest_state(store: ObjectStore, job_id: str) -> tuple[int, TreeManifest] | None:
    """Return the files that a job left for its next attempt, with the number of the attempt that left them."""
    owner = job_files(job_id)
    for attempt in store.numbers(f"{owner}/attempts"):
        if (manifest := store.manifest(owner, state_tree(attempt))) is not None:
            return attempt, manifest
    return None


def upload_path(file_id: str) -> str:
    """Return where an upload is; its id ends with the content's SHA-256."""
    return f"{_UPLOADS}/{file_id.removeprefix('file_')}"


def put_upload(store: ObjectStore, file: BinaryIO) -> None:
    store.put("", _UPLOADS, file)


def fetch_upload(store: ObjectStore, layout: DataLayout, file_id: str) -> None:
    """Fetch an upload into the data folder, unless it is there."""
    path, remote = layout.file(file_id), upload_path(file_id)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with Folder.open(path.parent) as folder:
            store.fetch(RemoteFile(store, remote, path.name, store.size(remote)), folder, path.name)


def _join_path(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _digest(file: BinaryIO, size: int, target: Any = None) -> str:
    """Return the hash of the first bytes of a file, and write them to ``target``."""
    digest, left = hashlib.sha256(), size
    while left and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _is_there(file: RemoteFile, folder: Folder, name: str) -> bool:
    with contextlib.suppress(OSError), folder.reader(name) as held:
        size = os.fstat(held.fileno()).st_size
        return size == file.bytes and _digest(held, size) == file.sha256
    return False


@contextlib.contextmanager
def _name_object_in_errors(path: str) -> Iterator[None]:
    """Turn any error of fsspec's libraries into an :class:`OSError` that names the object."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ObjectStoreError(f"{path}: {error}") from error
    except Exception as error:
        raise ObjectStoreError(f"{path}: {type(error).__name__}: {error}") from error
