"""Uploads: content-addressed, streamed to disk, limited in size."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response, status
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from api.context import StoreDep
from api.params import refuse
from api.problems import ProblemError
from api.routes.artifacts import BYTES, download
from api.security import Reader, Submitter
from service.jobs.records import StoredFile
from service.jobs.store import Store

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FORM = {
    "schema": {
        "type": "object",
        "required": ["file"],
        "properties": {"file": {"type": "string", "format": "binary"}},
    }
}
_BODY = {
    "requestBody": {"required": True, "content": {"application/octet-stream": _BINARY, "multipart/form-data": _FORM}}
}


_FORM_BYTES = 1 << 16
"""What a multipart form may take beside the file in it; the file itself is measured as it is written."""


def build_router(max_file_bytes: int) -> APIRouter:
    """Return the routes; uploads have a size limit of their own."""
    router = APIRouter(tags=["files"])
    router.add_api_route(
        "/files",
        upload_file,
        methods=["POST"],
        status_code=status.HTTP_201_CREATED,
        response_model=StoredFile,
        openapi_extra=_BODY,
        max_body_size=max_file_bytes + _FORM_BYTES,
    )
    router.add_api_route("/files/{file_id}", get_file, response_class=FileResponse, responses=BYTES)
    return router


async def upload_file(request: Request, response: Response, key: Submitter, store: StoreDep) -> StoredFile:
    """Store a file: the raw body, or the field ``file`` of a multipart form. The same bytes give the same id."""
    media_type = request.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
    if media_type == "multipart/form-data":
        stored = await _from_form(request, store)
    elif media_type == "application/x-www-form-urlencoded":
        raise ProblemError(415, "send the raw bytes, or a multipart form with the field 'file'")
    else:
        stored = await _from_body(request, store, media_type or "application/octet-stream")
    response.headers["Location"] = str(request.app.url_path_for("get_file", file_id=stored.id))
    return stored


async def _from_body(request: Request, store: Store, media_type: str) -> StoredFile:
    """Store the body straight from the connection; an upload that breaks off leaves nothing."""
    empty = True
    with await run_in_threadpool(store.files.writer) as writer:
        async for chunk in request.stream():
            empty = empty and not chunk
            await run_in_threadpool(writer.write, chunk)
        if empty:
            raise _empty()
        return await run_in_threadpool(writer.commit, media_type)


async def _from_form(request: Request, store: Store) -> StoredFile:
    async with request.form(max_files=1, max_fields=0) as form:
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise refuse("file", "the form has no file of this name", sorted(form), "one file in the field 'file'")
        if not upload.size:
            raise _empty()
        return await run_in_threadpool(store.files.add, upload.file, upload.content_type or "application/octet-stream")


def _empty() -> Exception:
    return refuse("", "the file is empty", "", "at least one byte")


def get_file(file_id: str, request: Request, key: Reader, store: StoreDep) -> Any:
    """Return the bytes of an uploaded file."""
    stored, path = store.files.get(file_id)
    return download(request, path, stored.id, stored.media_type, stored.sha256)
