"""Stores uploaded files: streamed to disk, addressed by the hash of their content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from service.jobs.layout import DataLayout
from service.jobs.records import NotFound, StoredFile
from service.jobs.spec.base import FILE_ID
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import FILES

_CHUNK = 1 << 20
_DRAFT = "upload-"
_ABANDONED_S = 3600.0
"""An upload that gets no byte for so long has lost its client."""


class TooLarge(Exception):  # noqa: N818
    """An upload went past the limit; nothing of it was kept."""


class FileWriter:
    """An upload in progress: write chunks, then :meth:`commit`. Leaving the context without a commit keeps nothing."""

    def __init__(self, client: BrokerClient, folder: Path, max_file_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_DRAFT, dir=folder)
        self._client = client
        self._max_file_bytes = max_file_bytes
        self._file = os.fdopen(handle, "wb")
        self._temporary = Path(name)
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, chunk: bytes) -> None:
        """Append a chunk. Raises :class:`TooLarge` as soon as the limit is passed."""
        self._bytes += len(chunk)
        if self._bytes > self._max_file_bytes:
            limit = f"{self._max_file_bytes} bytes, the limit of this service (TRIVET_MAX_FILE_BYTES)"
            raise TooLarge(f"the upload is larger than {limit}")
        self._hash.update(chunk)
        self._file.write(chunk)

    def commit(self, media_type: str) -> StoredFile:
        """Publish the file. The same content again is the same file; it keeps its first media type."""
        self._file.flush()
        os.fsync(self._file.fileno())
        digest = self._hash.hexdigest()
        stored = StoredFile(id=f"file_{digest}", sha256=digest, bytes=self._bytes, media_type=media_type)
        final = path_of(self._temporary.parent, digest)
        final.parent.mkdir(exist_ok=True)
        self._temporary.replace(final)
        self._client.call("HSETNX", FILES(), stored.id, stored.model_dump_json())
        return StoredFile.model_validate_json(self._client.call("HGET", FILES(), stored.id))

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def path_of(folder: Path, digest: str) -> Path:
    return folder / digest[:2] / digest


@dataclass(frozen=True)
class Files:
    """Uploaded files by id (``file_`` and the SHA-256 of the content)."""

    client: BrokerClient
    data: DataLayout
    max_file_bytes: int

    def writer(self) -> FileWriter:
        """Return a writer for callers that receive chunks one at a time; use it as a context manager."""
        return FileWriter(self.client, self.data.files, self.max_file_bytes)

    def add(self, stream: BinaryIO | Iterable[bytes], media_type: str) -> StoredFile:
        """Store a stream. Raises :class:`TooLarge`, keeping nothing."""
        chunks = stream if not hasattr(stream, "read") else iter(lambda: stream.read(_CHUNK), b"")
        with self.writer() as writer:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit(media_type)

    def delete_abandoned(self, age_s: float = _ABANDONED_S) -> list[Path]:
        """Delete what uploads left behind whose process was killed: drafts that nobody wrote to for so many seconds."""
        oldest = time.time() - age_s
        gone = []
        for draft in self.data.files.glob(f"{_DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                if draft.stat().st_mtime < oldest:
                    draft.unlink()
                    gone.append(draft)
        return gone

    def get(self, file_id: str) -> tuple[StoredFile, Path]:
        """Return the record of an uploaded file and its path. Raises :class:`NotFound`."""
        text = self.client.call("HGET", FILES(), file_id) if FILE_ID.fullmatch(file_id) else None
        if text is None:
            raise NotFound(f"there is no file {file_id}")
        stored = StoredFile.model_validate_json(text)
        path = path_of(self.data.files, stored.sha256)
        if not path.is_file():
            raise NotFound(f"the content of file {file_id} is gone from the data directory")
        return stored, path
