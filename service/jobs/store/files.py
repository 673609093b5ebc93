"""Stores uploaded files: streamed to disk, addressed by the hash of their content, each entered for its project."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from errno import ENOSPC
from pathlib import Path
from typing import BinaryIO

from service.jobs.accounts import DEFAULT_PROJECT, Project
from service.jobs.files import DataLayout
from service.jobs.files.objects import ObjectStore, fetch_upload, put_upload, upload_path
from service.jobs.records import Conflict, NotFound, OverQuota, StoredFile, Upload
from service.jobs.spec.common import FILE_ID
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import PROJECTS, UPLOAD_HOLDERS, UPLOADS

_CHUNK = 1 << 20
_DRAFT, _NOT_ENTERED = "upload-", "not-entered-"
_KEPT_FREE, _KEPT_SHARE = 1 << 26, 0.05
"""Bytes of the disk that uploads leave free, or a share of a small disk."""
_LOOK_EVERY = 1 << 24
"""Bytes of an upload after which the free space of its disk is checked again."""
_ABANDONED_S = 3600.0
"""An upload that receives no byte for so long has lost its client."""
_DAY_S = 86_400.0


class TooLarge(Exception):  # noqa: N818
    """An upload exceeded the limit; nothing of it was kept."""


@dataclass(frozen=True)
class UploadedBy:
    """Names the owner of an upload: a project, and the owner of the key that sent it."""

    project: str = DEFAULT_PROJECT
    owner: str = ""


class FileWriter:
    """An upload in progress: write chunks, then :meth:`commit`. Leaving the context without a commit keeps nothing."""

    def __init__(
        self,
        client: BrokerClient,
        data: DataLayout,
        max_file_bytes: int,
        uploader: UploadedBy,
        objects: ObjectStore | None,
    ) -> None:
        data.files.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_DRAFT, dir=data.files)
        self._client = client
        self._data = data
        self._max_file_bytes = max_file_bytes
        self._uploader, self._objects = uploader, objects
        self._file = os.fdopen(handle, "wb")
        self._temporary = Path(name)
        self._hash = hashlib.sha256()
        self._bytes = 0

    def expect(self, size: int) -> None:
        """Raise :class:`TooLarge` for an upload of so many bytes, and :class:`OSError` if the disk has no room
        for it: before its content, which may take minutes. Some of the disk is reserved for the broker.
        """
        if size > self._max_file_bytes:
            limit = f"{self._max_file_bytes} bytes, the limit of this service (TRIVET_MAX_FILE_BYTES)"
            raise TooLarge(f"the upload is larger than {limit}")
        disk = shutil.disk_usage(self._data.files)
        if size - self._bytes > disk.free - min(_KEPT_FREE, disk.total * _KEPT_SHARE):
            raise OSError(
                ENOSPC, f"an upload of {size} bytes leaves too little of {disk.free} free", str(self._data.files)
            )

    def write(self, chunk: bytes) -> None:
        """Append a chunk. Raises like :meth:`expect`, as soon as the upload is too large."""
        total = self._bytes + len(chunk)
        if total > self._max_file_bytes or total // _LOOK_EVERY > self._bytes // _LOOK_EVERY:
            self.expect(total)
        self._bytes = total
        self._hash.update(chunk)
        self._file.write(chunk)

    def commit(self, media_type: str, name: str = "") -> StoredFile:
        """Publish the file. The same content again in its project is the same file; it keeps its first entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        digest = self._hash.hexdigest()
        stored = StoredFile(
            id=f"file_{digest}",
            sha256=digest,
            bytes=self._bytes,
            media_type=media_type,
            name=name,
            project=self._uploader.project,
            owner=self._uploader.owner,
            created_at=decode.now(),
        )
        final, mark = self._data.file(stored.id), self._data.files / f"{_NOT_ENTERED}{stored.id}"
        with _lock_uploads(self._data):
            mark.touch()  # it stays if what follows fails, and expiry then deletes the content
            final.parent.mkdir(exist_ok=True)
            self._temporary.replace(final)
            if self._objects is not None:
                with final.open("rb") as file:
                    put_upload(self._objects, file)
            entry = stubs.add_upload(self._client, stored.project, stored.id, stored.model_dump_json())
            if not entry:
                _delete_unheld(self._client, self._data, self._objects, stored.id)
            mark.unlink()
            if not entry:
                raise OverQuota(self._over(stored))
        return StoredFile.model_validate_json(entry)

    def _over(self, stored: StoredFile) -> str:
        """Describe the largest uploads of a project that has no room for another one."""
        project = self._uploader.project
        most = Project.model_validate_json(self._client.call("HGET", PROJECTS(), project)).quotas.upload_bytes
        held = _held(self._client, project)
        largest = sorted(held, key=lambda each: -each.bytes)[:3]
        what = ", ".join(f"{each.name or each.id} has {each.bytes}" for each in largest)
        bytes_held = sum(each.bytes for each in held)
        detail = f"project '{project}' has {bytes_held} of {most} bytes of uploads, and this one has {stored.bytes}"
        return f"{detail}; the largest: {what}" if what else detail

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _held(client: BrokerClient, project: str) -> list[StoredFile]:
    return [StoredFile.model_validate_json(text) for text in client.call("HVALS", UPLOADS(project))]


def _place(stored: StoredFile) -> str:
    """Return the place of an upload among others, as text: the newest ones come first."""
    microseconds = 0 if stored.created_at is None else round(stored.created_at.timestamp() * 1_000_000)
    return f"{(1 << 53) - microseconds:016}-{stored.id}"


def _delete_unheld(client: BrokerClient, data: DataLayout, objects: ObjectStore | None, file_id: str) -> None:
    """Delete the content of an upload, unless a project has it."""
    if not client.call("SMEMBERS", UPLOAD_HOLDERS(file_id)):
        data.file(file_id).unlink(missing_ok=True)
        if objects is not None:
            objects.remove(upload_path(file_id))


@contextlib.contextmanager
def _lock_uploads(data: DataLayout) -> Iterator[None]:
    """Hold the lock under which contents are added and deleted: otherwise one that is uploaded again might be deleted
    with its last entry.
    """
    with data.uploads_lock.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Files:
    """Uploaded files by id (``file_`` and the SHA-256 of the content). A project sees only its own."""

    client: BrokerClient
    data: DataLayout
    max_file_bytes: int
    keep_days: float | None
    """Days after its last use at which an upload expires; ``None`` keeps all."""
    objects: ObjectStore | None = None
    """The store in which other hosts find the content, if hosts share no folder."""

    def writer(self, uploader: UploadedBy = UploadedBy()) -> FileWriter:
        """Return a writer for callers that receive chunks one at a time; use it as a context manager."""
        return FileWriter(self.client, self.data, self.max_file_bytes, uploader, self.objects)

    def add(
        self,
        stream: BinaryIO | Iterable[bytes],
        media_type: str,
        *,
        name: str = "",
        uploader: UploadedBy = UploadedBy(),
    ) -> StoredFile:
        """Store a stream. Raises :class:`TooLarge`, keeping nothing."""
        chunks = stream if not hasattr(stream, "read") else iter(lambda: stream.read(_CHUNK), b"")
        with self.writer(uploader) as writer:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit(media_type, name)

    def delete_abandoned(self) -> list[Path]:
        """Delete the drafts of uploads whose process was killed: those that got no data for so many seconds."""
        oldest = time.time() - _ABANDONED_S
        gone = []
        for draft in self.data.files.glob(f"{_DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                if draft.stat().st_mtime < oldest:
                    draft.unlink()
                    gone.append(draft)
        return gone

    def get(self, file_id: str, project: str = DEFAULT_PROJECT) -> tuple[StoredFile, Path]:
        """Return the record of a project's upload and the path of its content. Raises :class:`NotFound`."""
        text = self.client.call("HGET", UPLOADS(project), file_id) if FILE_ID.fullmatch(file_id) else None
        if text is None:
            raise NotFound(f"there is no file {file_id}")
        path = self.data.file(file_id)
        with contextlib.suppress(FileNotFoundError):
            self.fetch(file_id)
        if not path.is_file():
            raise NotFound(f"the content of file {file_id} is missing from the data folder")
        return StoredFile.model_validate_json(text), path

    def fetch(self, file_id: str) -> None:
        """Fetch the content of an upload from the object store, if there is one and the content is not here.
        Raises :class:`OSError`.
        """
        if self.objects is not None:
            fetch_upload(self.objects, self.data, file_id)

    def projects_of(self, file_id: str) -> list[str]:
        """Return the projects that have uploaded a file, for operators."""
        return sorted(self.client.call("SMEMBERS", UPLOAD_HOLDERS(file_id)))

    def list(self, project: str, limit: int, after: str = "") -> tuple[list[Upload], int, str]:
        """Return a project's uploads behind a place in their order, newest first, how many it has in all, and the place
        of the last one, which is empty if none follow. Uploads that come or go meanwhile move no place.
        """
        found = sorted(_held(self.client, project), key=_place)
        left = [stored for stored in found if _place(stored) > after]
        chosen = left[:limit]
        told = stubs.describe_uploads(self.client, project, *(stored.id for stored in chosen)) if chosen else []
        items = [self._upload(stored, *told_of) for stored, told_of in zip(chosen, told, strict=True)]
        return items, len(found), _place(chosen[-1]) if len(left) > limit else ""

    def _upload(self, stored: StoredFile, used: str, job_count: int, jobs: Iterable[str], in_use: str) -> Upload:
        last = decode.moment(used) if used else None
        keeps = self.keep_days is None or bool(in_use) or last is None
        return Upload(
            **stored.model_dump(),
            last_used_at=last,
            expires_at=None if keeps or last is None else last + timedelta(days=self.keep_days or 0.0),
            in_use=bool(in_use),
            job_count=job_count,
            jobs=tuple(jobs),
        )

    def delete(self, file_id: str, project: str = DEFAULT_PROJECT) -> None:
        """Delete a project's upload; the content goes with its last one. Raises :class:`NotFound`, and
        :class:`Conflict` while an unfinished job of the project names it.
        """
        self._forget(project, file_id, 0)

    def expire(self, most: int = 100) -> int:
        """Delete uploads unused for ``keep_days``, at most so many; return how many. An upload that an
        unfinished job names counts as used. Contents go too whose upload failed before any project had them.
        """
        for mark in self.data.files.glob(f"{_NOT_ENTERED}*"):
            with _lock_uploads(self.data):
                _delete_unheld(self.client, self.data, self.objects, mark.name.removeprefix(_NOT_ENTERED))
                mark.unlink(missing_ok=True)
        if self.keep_days is None:
            return 0
        before_ms = round((time.time() - self.keep_days * _DAY_S) * 1000)
        gone = 0
        for name in stubs.stale_uploads(self.client, before_ms, most):
            with contextlib.suppress(Conflict, NotFound):
                project, _, file_id = name.partition("/")
                self._forget(project, file_id, before_ms)
                gone += 1
        return gone

    def _forget(self, project: str, file_id: str, before_ms: int) -> None:
        if FILE_ID.fullmatch(file_id) is None:
            raise NotFound(f"there is no file {file_id}")
        with _lock_uploads(self.data):
            if stubs.forget_upload(self.client, project, file_id, before_ms):
                _delete_unheld(self.client, self.data, self.objects, file_id)
