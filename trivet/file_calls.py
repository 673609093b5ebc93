"""Provides the client's calls about files: uploads and downloads."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR, ENOENT
from os import PathLike
from pathlib import Path
from typing import IO
from urllib.parse import quote

import httpx2

from service.jobs.records import StoredFile, Upload
from trivet.connection import Connection

_LONGEST_NAME = 200


class FileCalls:
    """Calls of a :class:`trivet.Client` over its connection."""

    _connection: Connection

    def upload(
        self, path: str | PathLike[str], media_type: str = "application/octet-stream", *, project: str | None = None
    ) -> StoredFile:
        """Upload a file, or a zip of a script's folder; the same bytes give the same id.

        Only an operator's key may name another project.
        """
        name = Path(path).resolve().name[:_LONGEST_NAME]
        params = {"name": name} | ({} if project is None else {"project": project})

        def send() -> httpx2.Response:
            headers = {"Content-Type": media_type}
            with _content(Path(path)) as file:
                return self._connection.send("POST", "/v1/files", content=file, params=params, headers=headers)

        answer = self._connection.patience.outlast(send, bears_repetition=True)
        return StoredFile.model_validate(answer.json())

    def uploads(self, *, project: str | None = None) -> Iterator[Upload]:
        """Yield a project's uploads, the newest first: their names and sizes, their use, and when they expire."""
        return map(Upload.model_validate, self._connection.items("/v1/files", {"project": project}))

    def delete_upload(self, file_id: str, *, project: str | None = None) -> None:
        """Delete a project's upload, unless one of its unfinished jobs needs it."""
        self._connection.json("DELETE", f"/v1/files/{quote(file_id, safe='')}", params={"project": project})

    def download_file(self, file_id: str, target: str | PathLike[str]) -> int:
        """Write an uploaded file to ``target``, which appears only when it is complete. Returns its size in bytes."""
        return self._save(f"/v1/files/{quote(file_id, safe='')}", target)

    def _save(self, url: str, where: str | PathLike[str]) -> int:
        target = Path(where)
        return self._connection.patience.outlast(
            lambda: self._save_once(url, target), bears_repetition=not _is_written_in_place(target)
        )

    def _save_once(self, url: str, target: Path) -> int:
        with self._connection.stream(url) as response, _writing(target) as file:
            return sum(file.write(chunk) for chunk in response.iter_bytes())


@contextmanager
def _content(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to be uploaded; of a folder, a zip that is deleted afterwards."""
    if not path.is_dir():
        with path.open("rb") as file:
            yield file
        return
    from trivet.packing import pack_folder  # noqa: PLC0415 - few uploads are folders

    with tempfile.TemporaryFile() as packed:
        pack_folder(path, packed)
        packed.seek(0)
        yield packed


_NOT_OURS = (Path("/dev"), Path("/proc"))
"""Files below these are another process's open files: they are written to, never replaced."""


@contextmanager
def _writing(target: Path) -> Iterator[IO[bytes]]:
    """Open ``target`` for writing. A file, even behind a link, is replaced only once everything is written; a
    device, a pipe or a socket is written to directly.
    """
    if target.is_dir():
        raise IsADirectoryError(EISDIR, "it is a folder, where a file is wanted", str(target))
    if _is_written_in_place(target):
        with target.open("wb") as opened:
            yield opened
        return
    real = Path(os.path.realpath(target))
    if not real.parent.is_dir():
        raise FileNotFoundError(ENOENT, "there is no such folder", str(real.parent))
    partial = real.with_name(f".{uuid.uuid4().hex}.part")  # however long the name
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(real)
    finally:
        partial.unlink(missing_ok=True)


def _is_written_in_place(target: Path) -> bool:
    """Return whether the target must not be replaced, because what was written to it stays written."""
    if not target.exists():
        return False
    return not target.is_file() or any(target.absolute().is_relative_to(folder) for folder in _NOT_OURS)
