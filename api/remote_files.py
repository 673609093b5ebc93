"""Sends what is in an object store: whole files, ranges of them, and folders as tar archives."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from service.jobs.objects import RemoteFile, RemoteFolder
from service.jobs.records import NotFound

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def send_file(request: Request, file: RemoteFile, headers: dict[str, str], media_type: str) -> Response:
    """Return the bytes of a file, or of the one range that is asked for. What does not have its hash breaks off before
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


def send_folder(folder: RemoteFolder, headers: dict[str, str]) -> Response:
    """Return the files of a folder as a tar archive, under its own name."""
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(folder.name, safe='')}.tar", **headers}
    return StreamingResponse(_begun(_tar(folder)), media_type="application/x-tar", headers=headers)


def _range(request: Request, size: int) -> tuple[int, int] | None:
    """Return where the asked range begins and ends; ``None`` for the whole file, as for several ranges."""
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
    """Return the chunks once there is a first one: an object store that does not answer is told of by the status."""
    try:
        held = [next(chunks), next(chunks, b"")]
    except FileNotFoundError as error:
        raise NotFound("its content is gone from the object store") from error

    def rest() -> Iterator[bytes]:
        yield from filter(None, held)
        yield from filter(None, chunks)

    return rest()


def _tar(folder: RemoteFolder) -> Iterator[bytes]:
    for name, file in sorted(folder.files.items()):
        member = tarfile.TarInfo(f"{folder.name}/{name}")
        member.size, member.mode = file.bytes, 0o644
        yield member.tobuf(tarfile.PAX_FORMAT)
        yield from file.chunks()
        yield bytes(-file.bytes % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
