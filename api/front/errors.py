"""Decides which exception becomes which problem."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from api.callers import audit_refusal, context_of
from api.offload import CheckUnavailable
from api.requests import FieldError, Locator, ProblemError, from_refusals, from_validation, respond, summary
from service.jobs.files.objects import ObjectStoreError
from service.jobs.records import Conflict, NotFound, OverQuota, Rejected, Superseded
from service.jobs.store import BrokerCannotWrite, StoreUnavailable, TooLarge

log = logging.getLogger(__name__)

_DETAILS = {
    404: "there is nothing at this address",
    405: "this address does not take {method}; see the Allow header",
    413: "the body is larger than {limit} bytes, the limit of this address ({setting})",
    416: "the requested range is outside the file",
}
_CONFLICT = 409, "the request conflicts with the present state"
_REFUSALS: dict[type[Exception], tuple[int, str]] = {
    NotFound: (404, "there is no such resource"),
    Conflict: _CONFLICT,
    Superseded: _CONFLICT,
    OverQuota: (429, ""),
    TooLarge: (413, ""),
}
"""The status of each refusal, and its detail if the error has no words."""


def install(app: FastAPI) -> None:
    """Make every failure of ``app`` a problem."""
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Rejected, _rejected)
    for refusal in _REFUSALS:
        app.add_exception_handler(refusal, _refused)
    app.add_exception_handler(StoreUnavailable, _unavailable)
    app.add_exception_handler(BrokerCannotWrite, _not_writable)
    app.add_exception_handler(CheckUnavailable, _unchecked)
    app.add_exception_handler(ObjectStoreError, _without_objects)
    app.add_exception_handler(OSError, _system)
    app.add_exception_handler(Exception, _unexpected)


def plain_detail(status: int, scope: Scope, text: str = "") -> str:
    """Return our detail for an answer to the request of ``scope`` that a library has worded."""
    known = _DETAILS.get(status)
    if known is not None and text in ("", HTTPStatus(status).phrase, "Content Too Large"):
        limit, setting = _body_limit(scope)
        return known.format(method=scope["method"], limit=limit, setting=setting)
    return text or HTTPStatus(status).phrase


def _body_limit(scope: Scope) -> tuple[int, str]:
    """Return the most bytes of a body at this address, and the setting that an operator changes for more."""
    settings = context_of(scope["app"]).settings
    if scope["path"] == scope["app"].url_path_for("upload_file"):
        return settings.max_file_bytes, "TRIVET_MAX_FILE_BYTES"
    return settings.max_body_bytes, "TRIVET_MAX_BODY_BYTES"


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    if error.status == HTTPStatus.FORBIDDEN:
        audit_refusal(request, "permission.refuse", reason=error.detail)
    return respond(error.status, error.detail, errors=error.errors, headers=error.headers)


def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    endpoint = request.scope.get("endpoint")
    locator = None if endpoint is None else _body_locator(endpoint)
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if locator is not None and media_type != "application/json" and not media_type.endswith("+json"):
        return respond(415, f"the body is {media_type}; send application/json")
    errors = from_validation(error.errors(), locator)
    return respond(422, summary(errors), errors=errors)


@lru_cache
def _body_locator(endpoint: Callable[..., object]) -> Locator | None:
    """Return the locator of the fields of a handler's JSON body, which is its parameter ``body``."""
    body = get_type_hints(endpoint, include_extras=True).get("body")
    return None if body is None else Locator(TypeAdapter(body).core_schema)


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = plain_detail(error.status_code, request.scope, str(error.detail))
    return respond(error.status_code, detail, headers=error.headers)


def _rejected(request: Request, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    errors: list[FieldError] = from_refusals(error.problems)
    return respond(422, summary(errors), errors=errors)


def _refused(request: Request, error: Exception) -> Response:
    status, otherwise = next(answer for kind, answer in _REFUSALS.items() if isinstance(error, kind))
    return respond(status, str(error) or otherwise)


def _unavailable(request: Request, error: Exception) -> Response:
    log.warning("the broker is out of reach: %s", error)
    context_of(request.app).monitor.meter.count("trivet_broker_failures_total")
    return _try_again("the broker is out of reach; try again")


def _not_writable(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    context_of(request.app).monitor.meter.count("trivet_broker_failures_total")
    return _try_again(f"{error}; reads are answered")


def _without_objects(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return _try_again("the object store of this service does not answer; try again")


def _unchecked(request: Request, error: Exception) -> Response:
    log.warning("%s", error)
    return _try_again("the job could not be checked; try again")


def _try_again(detail: str) -> Response:
    return respond(503, detail, headers={"Retry-After": "2"})


def _system(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return _unexpected(request, error)
    log.error("%s %s found the disk full: %s", request.method, request.url.path, error)
    return respond(507, "the service's disk is full; its operator has to make room")


def _unexpected(request: Request, error: Exception) -> Response:
    """Log the traceback, which no client may see."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return respond(500, "the service failed to answer; its log says why")
