"""Writes RFC 9457 problem details, the one form of the API's refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.requests.error_paths import ErrorPlace, Locator
from service.jobs.records import LONGEST_TEXT, shortened
from service.jobs.records import Problem as Refusal
from service.jobs.spec.common import DISAGREEMENT, ID_EXPECTED, TOO_MANY_ERRORS
from service.jobs.text import log_field

MEDIA_TYPE = "application/problem+json"
_LONGEST_ECHO = 200
MOST_ERRORS = 50
"""Most fields that one answer names; a body of a megabyte can have hundreds of thousands of wrong ones."""
_MOST_TRANSLATED = 4 * MOST_ERRORS
"""Most errors of pydantic that are translated; several may be about one field."""
_LONGEST_DETAIL = 4 * LONGEST_TEXT


class FieldError(BaseModel):
    """One field that was refused."""

    path: str = Field(description="dotted path of the field; empty for the whole input")
    message: str
    got: Any = None
    expected: str = Field(description="what would be accepted")


class ProblemDetails(BaseModel):
    """Explains why a request failed (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = Field(None, description="with 422: field by field")
    request_id: str | None = Field(None, description="the answer's X-Request-ID, under which the log has the request")


class ProblemError(Exception):
    """Answer the request with a problem."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[FieldError] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors
        self.headers = headers


def respond(
    status: int, detail: str, *, errors: Sequence[FieldError] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a problem as a response: at most :data:`MOST_ERRORS` fields, and no text too long to read."""
    title = HTTPStatus(status).phrase
    errors = None if errors is None else _bounded(errors)
    request_id = log_field("request_id")
    body = ProblemDetails(
        title=title, status=status, detail=shortened(detail, _LONGEST_DETAIL), errors=errors, request_id=request_id
    )
    content = body.model_dump(exclude_none=True)
    if errors is not None:
        content["errors"] = [error.model_dump() for error in errors]
    sent = dict(headers or {}) | ({} if request_id is None else {"X-Request-ID": request_id})
    return _ProblemResponse(content, status_code=status, media_type=MEDIA_TYPE, headers=sent)


class _ProblemResponse(JSONResponse):
    """A refused value may hold a lone surrogate, which UTF-8 cannot encode: it is sent back as JSON's escape."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def _bounded(errors: Sequence[FieldError]) -> list[FieldError]:
    kept = [
        FieldError(
            path=shortened(error.path),
            message=shortened(error.message),
            got=echo(error.got),
            expected=shortened(error.expected),
        )
        for error in errors[:MOST_ERRORS]
    ]
    if len(errors) > MOST_ERRORS:
        message = f"more fields are wrong than the {MOST_ERRORS} named here"
        kept.append(FieldError(path="", message=message, expected="values as these fields expect them"))
    return kept


def invalid(errors: Sequence[FieldError]) -> ProblemError:
    """Return the 422 of an input that was understood and refused."""
    return ProblemError(422, summary(errors), errors=errors)


def summary(errors: Sequence[FieldError]) -> str:
    """Return all refusals in a sentence, for clients that show only ``detail``."""
    errors = errors[:MOST_ERRORS]
    told = (f"{error.message} (expected {error.expected})" for error in errors)
    return "; ".join(f"{error.path}: {each}" if error.path else each for error, each in zip(errors, told, strict=True))


def from_refusals(refusals: Iterable[Refusal]) -> list[FieldError]:
    """Return the job domain's refusals as field errors."""
    return [
        FieldError(path=refusal.path, message=refusal.message, got=echo(refusal.got), expected=refusal.expected)
        for refusal in refusals
    ]


def echo(value: Any) -> Any:
    """Return a value to send back: as JSON, cut to a useful length."""
    try:
        text = json.dumps(value, default=str, allow_nan=False)
        value = json.loads(text)
    except (ValueError, RecursionError):
        text = value = _show_value(value)
    return value if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}…"


def _show_value(value: Any) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or lists nested too deeply
        return f"a {type(value).__name__} that is too large to be shown"


_EXPECTED: dict[str, str] = {
    "missing": "a value",
    "json_invalid": "valid JSON",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of usual size",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "unrecorded": "finite numbers, integers of 64 bits, text of whole characters, or lists and mappings of these",
    "rounded_number": "a number that float64 has, such as {nearest}",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "datetime_parsing": "an ISO 8601 time",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "literal_error": "{expected}",
    "enum": "{expected}",
    TOO_MANY_ERRORS: "an object with the fields of its schema",
    "union_tag_invalid": "one of {expected_tags}",
    ID_EXPECTED: "{form}",
}


def from_validation(errors: Iterable[Mapping[str, Any]], locator: Locator | None) -> list[FieldError]:
    """Return pydantic's errors in a user's words, as many as an answer shows; several errors at one path (a union's
    members) become one.
    """
    merged: dict[str, FieldError] = {}
    for error in islice(errors, _MOST_TRANSLATED):
        found = _translate(error, locator)
        known = merged.get(found.path)
        if known is None:
            merged[found.path] = found
        elif found.expected not in known.expected:
            merged[found.path] = known.model_copy(update={"expected": f"{known.expected}, or {found.expected}"})
    return list(merged.values())


def _translate(error: Mapping[str, Any], locator: Locator | None) -> FieldError:
    source, *location = error["loc"] or ("",)
    if error["type"] == "json_invalid":
        where = f"at character {location[0]}" if location else ""
        reason = error.get("ctx", {}).get("error", "")
        return FieldError(path="", message=f"the body is not JSON: {reason} {where}".strip(), expected="valid JSON")
    if locator is not None and source == "body":
        place = locator.locate(location)
    else:
        place = ErrorPlace(tuple(str(element) for element in location) or (str(source),) * (source != "body"))
    context = error.get("ctx", {})
    if error["type"] == DISAGREEMENT:
        path = ".".join((*place.path, context["field"]))
        return FieldError(path=path, message=context["message"], got=echo(context["got"]), expected=context["expected"])
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(error, place, context)
    got = None if error["type"] == "missing" else error.get("input")
    message, expected = _words(error, place, context)
    return FieldError(path=place.dotted, message=message, got=echo(got), expected=expected)


def _wrong_tag(error: Mapping[str, Any], place: ErrorPlace, context: Mapping[str, Any]) -> FieldError:
    field = str(context["discriminator"]).strip("'")
    path = place.enter(field).dotted
    if error["type"] == "union_tag_not_found":
        given = error.get("input")
        message = (
            f"this field is required{_misspelt(given, place)}"
            if isinstance(given, dict)
            else "an object is needed here"
        )
        return FieldError(path=path, message=message, expected=f"an object with '{field}'")
    expected = f"one of {context['expected_tags']}"
    return FieldError(
        path=path,
        message=f"{context['tag']!r} is not known{_similar(context['tag'], expected)}",
        got=echo(context["tag"]),
        expected=expected,
    )


def _words(error: Mapping[str, Any], place: ErrorPlace, context: Mapping[str, Any]) -> tuple[str, str]:
    """Return (message, expected) of one error."""
    kind, message = error["type"], str(error["msg"])
    if kind == "extra_forbidden":
        return _unknown_field(place)
    if kind == "missing":
        return "this field is required" if place.path else "a body is required", _EXPECTED["missing"]
    if kind in ("value_error", "assertion_error"):
        message = message.partition(", ")[2] or message
        return message, "values that agree"
    if kind in ("literal_error", "enum"):
        given, expected = echo(error.get("input")), _EXPECTED[kind].format_map(context)
        return f"{given!r} is not known{_similar(given, expected)}", expected
    template = _EXPECTED.get(kind)
    if template is None and place.fields:
        given = error.get("input")
        return (
            f"this matches none of the accepted forms{_misspelt(given, place) if isinstance(given, dict) else ''}",
            message,
        )
    return message, message if template is None else template.format_map(context)


def _misspelt(given: Mapping[str, Any], place: ErrorPlace) -> str:
    """Return a hint at the probably intended field, if no member of the union at ``place`` has the given one."""
    hints = (_hint(str(name), place.fields) for name in given if name not in place.fields)
    return next(filter(None, hints), "")


def _hint(name: str, fields: Sequence[str]) -> str:
    close = get_close_matches(name, fields, n=1)
    return f"; {name!r} is not a field; did you mean {close[0]!r}?" if close else ""


def _similar(given: object, expected: str) -> str:
    """Return a hint at the probably intended one of the quoted names in ``expected``."""
    close = get_close_matches(str(given), expected.split("'")[1::2], n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def _unknown_field(place: ErrorPlace) -> tuple[str, str]:
    name = place.path[-1]
    close = get_close_matches(name, place.siblings, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"there is no field {name!r}{hint}", f"one of {', '.join(place.siblings)}" if place.siblings else "no field"
