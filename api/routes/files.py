"""Serves uploads: content-addressed, streamed to disk, limited in size."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from api.callers import Reader, StoreDep, Submitter, TargetProject, audit
from api.requests import Limit, ProblemError, refuse
from api.routes.artifacts import BYTES, download
from service.jobs.files import Folder
from service.jobs.records import StoredFile, Upload
from service.jobs.store import Store, UploadedBy

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FORM = {
    "schema": {"type": "object", "required": ["file"], "properties": {"file": {"type": "string", "format": "binary"}}}
}
_BODY = {
    "requestBody": {"required": True, "content": {"application/octet-stream": _BINARY, "multipart/form-data": _FORM}}
}


_LONGEST_NAME = 200
_FORM_BYTES = 1 << 16
"""Most bytes of a multipart form besides its file; the file itself is measured as it is written."""


def build_router(max_file_bytes: int) -> APIRouter:
    """Return the routes; uploads have their own size limit."""
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
    router.add_api_route("/files", list_files, response_model=Uploads)
    router.add_api_route("/files/{file_id}", get_file, response_class=FileResponse, responses=BYTES)
    router.add_api_route("/files/{file_id}", delete_file, methods=["DELETE"], status_code=status.HTTP_204_NO_CONTENT)
    return router


async def upload_file(
    *,
    request: Request,
    response: Response,
    key: Submitter,
    store: StoreDep,
    project: TargetProject,
    name: Annotated[str, Query(max_length=_LONGEST_NAME, description="what lists show; a form's file has one")] = "",
) -> StoredFile:
    """Store a file for a project: the raw body, or the field ``file`` of a multipart form. The same bytes give the same
    id.
    """
    uploader = UploadedBy(project, key.name)
    media_type = request.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
    if media_type == "multipart/form-data":
        stored = await _from_form(request, store, uploader, name)
    elif media_type == "application/x-www-form-urlencoded":
        raise ProblemError(415, "send the raw bytes, or a multipart form with the field 'file'")
    else:
        stored = await _from_body(request, store, uploader, name, media_type or "application/octet-stream")
    await run_in_threadpool(audit, request, "file.upload", subject=stored.id, bytes=str(stored.bytes))
    response.headers["Location"] = str(request.app.url_path_for("get_file", file_id=stored.id))
    return stored


async def _from_body(request: Request, store: Store, uploader: UploadedBy, name: str, media_type: str) -> StoredFile:
    """Store the body straight from the connection; an upload that breaks off leaves nothing."""
    empty = True
    with await run_in_threadpool(store.files.writer, uploader) as writer:
        if (length := request.headers.get("content-length", "")).isdecimal():
            await run_in_threadpool(writer.expect, int(length))
        async for chunk in request.stream():
            empty = empty and not chunk
            await run_in_threadpool(writer.write, chunk)
        if empty:
            raise _empty()
        return await run_in_threadpool(writer.commit, media_type, name)


async def _from_form(request: Request, store: Store, uploader: UploadedBy, name: str) -> StoredFile:
    async with request.form(max_files=1, max_fields=0) as form:
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise refuse("file", "the form has no file of this name", sorted(form), "one file in the field 'file'")
        if not upload.size:
            raise _empty()
        media_type, given = upload.content_type or "application/octet-stream", (upload.filename or "")[:_LONGEST_NAME]
        return await run_in_threadpool(store.files.add, upload.file, media_type, name=name or given, uploader=uploader)


def _empty() -> Exception:
    return refuse("", "the file is empty", "", "at least one byte")


class Uploads(BaseModel):
    """A page of a project's uploads, the newest first."""

    items: list[Upload]
    total: int
    next_cursor: str | None


def list_files(
    *,
    key: Reader,
    store: StoreDep,
    project: TargetProject,
    limit: Limit = 50,
    cursor: Annotated[
        str | None,
        Query(pattern=r"^[0-9]{16}-file_[0-9a-f]{64}$", description="`next_cursor` of the previous page"),
    ] = None,
) -> Uploads:
    """List a project's uploads: who sent them, which jobs use them, and when they expire."""
    items, total, following = store.files.list(project, limit, cursor or "")
    return Uploads(items=items, total=total, next_cursor=following or None)


def get_file(file_id: str, request: Request, key: Reader, store: StoreDep) -> Any:
    """Return the bytes of an uploaded file."""
    holders = [key.submits_to] if key.project else [*store.files.projects_of(file_id), key.submits_to]
    stored, path = store.files.get(file_id, holders[0])
    with Folder.open(path.parent) as folder:
        return download(request, folder.reader(path.name), stored.id, stored.media_type, stored.sha256)


def delete_file(file_id: str, request: Request, key: Submitter, store: StoreDep, project: TargetProject) -> None:
    """Delete a project's upload, unless an unfinished job needs it. Other projects keep the content."""
    stored, _ = store.files.get(file_id, project)
    if not key.is_operator and key.role != "maintainer" and stored.owner != key.name:
        detail = f"{file_id} was uploaded by '{stored.owner or 'an older version'}'"
        raise ProblemError(403, f"{detail}; only its owner, a maintainer of the project or an admin may delete it")
    store.files.delete(file_id, project)
    audit(request, "file.delete", subject=file_id, project=project)
