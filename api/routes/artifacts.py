"""Files that a job produced, and folders as tar archives."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel

from api.access import ReadableJob
from api.context import StoreDep
from service.jobs.records import Artifact, NotFound
from service.jobs.states import TERMINAL
from service.jobs.store.artifacts import FOLDER

router = APIRouter(tags=["artifacts"])

_ENDED_EARLY = TERMINAL - {"succeeded"}
"""What such a job would have published when it was done is not in its manifest."""
_SHOWN_AS_THEY_ARE = frozenset({"application/json", "text/plain", "text/csv", "image/png", "application/x-ndjson"})
_SANDBOX = {"Content-Security-Policy": "sandbox"}
"""What a job or a user wrote gets no rights of this site, even where a browser shows it."""
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
    """List all artifacts by name, with size and hash; of a job that failed or was cancelled also its checkpoints."""
    left = store.artifacts.left(job.id) if job.state in _ENDED_EARLY else ()
    found = {artifact.name: artifact for artifact in (*left, *store.artifacts.list(job.id))}
    return Artifacts(items=[found[name] for name in sorted(found)])


@router.get("/jobs/{job_id}/artifacts/{name:path}", response_class=FileResponse, responses=BYTES)
def get_artifact(job: ReadableJob, name: str, request: Request, store: StoreDep) -> Response:
    """Return the bytes of one artifact; ranges and conditional requests are honoured. A folder comes as a tar
    archive.
    """
    try:
        artifact, path = store.artifacts.get(job.id, name)
    except NotFound:
        if job.state not in _ENDED_EARLY:
            raise
        artifact, path = store.artifacts.get_left(job.id, name)
    if artifact.media_type == FOLDER:
        return _archive(path)
    return download(request, path, name.rpartition("/")[2], artifact.media_type, artifact.sha256)


def _archive(folder: Path) -> Response:
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(folder.name, safe='')}.tar",
        "Cache-Control": "private, no-store",
        **_SANDBOX,
    }
    return StreamingResponse(_tar_stream(folder), media_type="application/x-tar", headers=headers)


def download(request: Request, path: Path, filename: str, media_type: str, sha256: str) -> Response:
    """Return bytes for saving, never for showing: a browser must not run what a job wrote."""
    etag = f'"{sha256}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", **_SANDBOX}
    known = request.headers.get("if-none-match", "")
    if etag in (part.strip().removeprefix("W/") for part in known.split(",")):
        return Response(status_code=304, headers=headers)
    shown = media_type if media_type in _SHOWN_AS_THEY_ARE else "application/octet-stream"
    return FileResponse(path, headers=headers, media_type=shown, filename=filename)


_CHUNK = 1 << 20


def _tar_stream(folder: Path) -> Iterator[bytes]:
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
