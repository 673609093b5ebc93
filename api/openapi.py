"""Assembles the OpenAPI document: what FastAPI derives from the code, with our problems as the errors of every call."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.problems import MEDIA_TYPE, ProblemDetails
from service.jobs.kinds.registry import KINDS

_ERRORS = {
    "401": "no valid API key",
    "403": "the key may not do this",
    "404": "there is no such thing",
    "409": "the request contradicts the present state",
    "413": "the body is too large",
    "422": "the input was refused; `errors` says where and why",
    "429": "too many open streams, or submissions that wait to be checked",
    "503": "the broker is out of reach, or a check could not be made",
}


def document(app: FastAPI) -> None:
    """Let ``app.openapi()`` describe errors as they are."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _build(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    own = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    components.update(own.pop("$defs", {}))
    components["ProblemDetails"] = own
    for name in ("Job", "ListedJob"):
        if name in components:
            components[name]["properties"]["kind"]["enum"] = list(KINDS.provided)
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _describe_errors(path, operation)
    return schema


def _describe_errors(path: str, operation: dict[str, Any]) -> None:
    operation["responses"].pop("422", None)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    wanted = _ERRORS if path.startswith("/v1") else {"503": _ERRORS["503"]}
    for status, description in wanted.items():
        operation["responses"].setdefault(status, {"description": description, "content": content})
