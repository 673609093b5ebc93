"""Files that a job produced, and folders as tar archives, from this machine's disk or from an object store."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import MalformedRangeHeader
from starlette.types import Receive, Scope, Send

from api.callers import ReadableJob, StoreDep
from service.jobs.files import Folder
from service.jobs.files.objects import RemoteFile, RemoteFolder
from service.jobs.records import Artifact, NotFound

_CHUNK = 1 << 17
"""Bytes of an answer that are sent at once: other requests wait meanwhile."""
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def send_file(request: Request, file: RemoteFile, headers: dict[str, str], media_type: str) -> Response:
    """Return the bytes of a file, or of the one requested range. A file whose hash is wrong breaks off before
    its end.
    """
    chosen = (
        _range(request, file.bytes) if request.headers.get("if-range", headers["ETag"]) == headers["ETag"] else None
    )
    start, end = chosen or (0, file.bytes)
    headers = {**headers, "Accept-Ranges": "bytes", "Content-Length": str(end - start)}
    if chosen is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.bytes}"
    chunks = _begun(file.chunks(start, end))
    return StreamingResponse(chunks, 200 if chosen is None else 206, headers=headers, media_type=media_type)


def send_folder(folder: Folder | RemoteFolder) -> Response:
    """Return the files of a folder as a tar archive, under its own name."""
    if isinstance(folder, Folder):
        name, chunks = folder.path.name, _tar(folder.path.name, _local_members(folder))
    else:
        name, chunks = folder.name, _begun(_tar(folder.name, _remote_members(folder)))
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}.tar",
        "Cache-Control": "private, no-store",
        **_SANDBOX,
    }
    return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)


def _range(request: Request, size: int) -> tuple[int, int] | None:
    """Return where the requested range begins and ends; ``None`` for the whole file or several ranges."""
    found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last) + 1, size) if first and last else size
    if first and last and int(last) < int(first):
        return None
    if start >= end:
        raise HTTPException(416, headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _begun(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the chunks once there is a first one, so that the status can report an object store that does not
    answer.
    """
    try:
        held = [next(chunks), next(chunks, b"")]
    except FileNotFoundError as error:
        raise NotFound("its content is missing from the object store") from error

    def rest() -> Iterator[bytes]:
        for chunk in chain(held, chunks):
            yield from (chunk[at : at + _CHUNK] for at in range(0, len(chunk), _CHUNK))

    return rest()


_Member = tuple[str, int, float, Iterator[bytes]]
"""A file's path in its folder, its size, when it was changed, and its content."""


def _tar(name: str, members: Iterable[_Member]) -> Iterator[bytes]:
    for path, size, changed, content in members:
        member = tarfile.TarInfo(f"{name}/{path}")
        member.size, member.mtime, member.mode = size, int(changed), 0o644
        yield member.tobuf(tarfile.PAX_FORMAT)
        yield from content
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _remote_members(folder: RemoteFolder) -> Iterator[_Member]:
    for name, file in sorted(folder.files.items()):
        yield name, file.bytes, 0, file.chunks()


def _local_members(folder: Folder) -> Iterator[_Member]:
    """Yield the regular files below ``folder``, in order of their names. Links are left out."""
    with folder:
        for each in folder.files():
            with folder.reader(each.name) as file:
                status = os.fstat(file.fileno())
                yield each.name, status.st_size, status.st_mtime, _content(file, status.st_size, each.name)


def _content(file: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    """Yield a file's bytes. One that shrinks meanwhile ends the answer with :class:`OSError`: the archive is then
    incomplete, and its reader sees the connection break.
    """
    left = size
    while left:
        chunk = file.read(min(_CHUNK, left))
        if not chunk:
            raise OSError(f"{name} became shorter while it was read")
        left -= len(chunk)
        yield chunk


router = APIRouter(tags=["artifacts"])

_SHOWN_AS_THEY_ARE = frozenset({"application/json", "text/plain", "text/csv", "image/png", "application/x-ndjson"})
_SANDBOX = {"Content-Security-Policy": "sandbox"}
"""Files from jobs and users get no rights of this site, even if a browser shows them."""
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"description": "the bytes", "content": {"application/octet-stream": {"schema": {"type": "string"}}}},
    206: {"description": "the bytes of the requested range"},
    304: {"description": "the client has these bytes"},
    416: {"description": "the range is outside the file"},
}


class Artifacts(BaseModel):
    items: list[Artifact]


@router.get("/jobs/{job_id}/artifacts")
def list_artifacts(job: ReadableJob, store: StoreDep) -> Artifacts:
    """List all artifacts by name, with size and hash; for a job that has not succeeded, also its checkpoints so far."""
    left = () if job.state == "succeeded" else store.artifacts.left(job.id)
    found = {artifact.name: artifact for artifact in (*left, *store.artifacts.list(job.id))}
    return Artifacts(items=[found[name] for name in sorted(found)])


@router.get("/jobs/{job_id}/artifacts/{name:path}", response_class=FileResponse, responses=BYTES)
def get_artifact(job: ReadableJob, name: str, request: Request, store: StoreDep) -> Response:
    """Return the bytes of one artifact; ranges and conditional requests are honoured. A folder comes as a tar
    archive.
    """
    try:
        artifact, found = store.artifacts.open(job.id, name)
    except NotFound:
        if job.state == "succeeded":
            raise
        artifact, found = store.artifacts.open_left(job.id, name)
    if isinstance(found, Folder | RemoteFolder):
        return send_folder(found)
    return download(request, found, name.rpartition("/")[2], artifact.media_type, artifact.sha256)


class OpenFileResponse(FileResponse):
    """Sends an open file, whatever its name refers to by now, and closes it."""

    def __init__(self, file: BinaryIO, *, headers: dict[str, str], media_type: str, filename: str) -> None:
        number = file.fileno()
        super().__init__(
            f"/proc/self/fd/{number}",
            headers=headers,
            media_type=media_type,
            filename=filename,
            stat_result=os.fstat(number),
        )
        self._file = file

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        """Return the requested ranges; none, for the whole file, if the header cannot be read, as HTTP wants it."""
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            return []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def download(request: Request, file: BinaryIO | RemoteFile, filename: str, media_type: str, sha256: str) -> Response:
    """Return bytes for saving, never for showing: a browser must not run a job's files. ``file`` is closed."""
    etag = f'"{sha256}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", **_SANDBOX}
    known = request.headers.get("if-none-match", "")
    if etag in (part.strip().removeprefix("W/") for part in known.split(",")):
        if not isinstance(file, RemoteFile):
            file.close()
        return Response(status_code=304, headers=headers)
    shown = media_type if media_type in _SHOWN_AS_THEY_ARE else "application/octet-stream"
    if isinstance(file, RemoteFile):
        headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(filename, safe='')}"
        return send_file(request, file, headers, shown)
    return OpenFileResponse(file, headers=headers, media_type=shown, filename=filename)
