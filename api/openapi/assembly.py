"""Assembles the OpenAPI document: FastAPI derives it from the code; our problems are added as the errors of every
call.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.openapi.field_descriptions import describe_fields, describe_parameters
from api.requests import MEDIA_TYPE, ProblemDetails
from service.jobs.kinds.registry import KINDS

_ERRORS = {
    "401": "no valid API key",
    "403": "the key may not do this",
    "404": "there is no such resource",
    "409": "the request conflicts with the present state",
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
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        webhooks=app.webhooks.routes,
    )
    for operation in (each for told in schema["webhooks"].values() for each in told.values()):
        operation["responses"] = {"200": {"description": "taken; any other 2xx means the same"}}
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    own = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    components.update(own.pop("$defs", {}))
    components["ProblemDetails"] = own
    for name in ("Job", "ListedJob"):
        if name in components:
            components[name]["properties"]["kind"]["enum"] = list(KINDS.provided)
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    describe_fields(components)
    for component in components.values():
        for described in component.get("properties", {}).values():
            _simplify(described)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            describe_parameters(operation)
            for parameter in operation.get("parameters", ()):
                _simplify_parameter(parameter["schema"])
            _describe_errors(path, operation)
    return schema


def _simplify(described: dict[str, Any]) -> None:
    """Rewrite a property in terms that stock client generators know: they drop a whole operation because of a
    default that is an object, or an enumeration of several types.
    """
    default = described.get("default")
    if isinstance(default, dict):
        del described["default"]
        text = f"{described.get('description', '')}\n\nDefault: `{json.dumps(default)}`"
        described["description"] = text.strip()
    values = described.get("enum", ())
    types = [list(same) for _, same in groupby(values, key=type)]
    if len(types) > 1:
        del described["enum"]
        described["anyOf"] = [{"const": same[0]} if len(same) == 1 else {"enum": same} for same in types]


def _simplify_parameter(schema: dict[str, Any]) -> None:
    """Drop null from a parameter's types: no URL and no header can express it."""
    forms = [form for form in schema.get("anyOf", ()) if form.get("type") != "null"]
    if len(forms) == 1:
        del schema["anyOf"]
        schema.update(forms[0])


def _describe_errors(path: str, operation: dict[str, Any]) -> None:
    operation["responses"].pop("422", None)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    wanted = _ERRORS if path.startswith("/v1") else {"503": _ERRORS["503"]}
    for status, description in wanted.items():
        operation["responses"].setdefault(status, {"description": description, "content": content})
