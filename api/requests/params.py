"""Query parameters that several resources share, and the refusal of those that a route does not take."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin

from fastapi import Header, Query, Request, params
from fastapi.dependencies.utils import get_flat_params
from pydantic import AfterValidator

from api.requests.problems import FieldError, echo, invalid
from service.jobs.records import Conflict
from service.jobs.store.tail import BEGINNING, parse_id

Limit = Annotated[int, Query(ge=1, le=1000, description="most items in the answer")]
PageCursor = Annotated[str | None, Query(max_length=200, description="`next_cursor` of the previous page")]
After = Annotated[str | None, Query(max_length=4000, description="only events after this id")]
Types = Annotated[str | None, Query(max_length=200, description="event types, separated by commas; all when absent")]


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


Moment = Annotated[datetime, AfterValidator(_in_utc)]
"""A time; one without a zone is in UTC."""

IdempotencyKey = Annotated[
    str | None, Header(min_length=1, max_length=200, description="for a day, the same key and body give the same jobs")
]

TICKET = "ticket"
"""The parameter that admits a session to the path of a link, whatever the route."""
_EVENT_STREAM = "text/event-stream"


def wants_stream(request: Request) -> bool:
    """Return whether the client asked for a live stream."""
    return _EVENT_STREAM in request.headers.get("accept", "")


def refuse(path: str, message: str, got: object, expected: str) -> Exception:
    """Return the 422 of one parameter."""
    return invalid([FieldError(path=path, message=message, got=echo(got), expected=expected)])


async def refuse_ignored(request: Request) -> None:
    """Refuse a parameter that the route does not take, or takes once and got twice: what a misspelt filter was to leave
    out would be listed, or deleted.
    """
    if not request.query_params:
        return
    taken = {
        field.alias: _takes_several(field.field_info.annotation)
        for field in get_flat_params(request.scope["route"].dependant)
        if isinstance(field.field_info, params.Query)
    }
    errors = []
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        given = request.query_params.getlist(name)
        if name not in taken and name != TICKET:
            close = get_close_matches(name, taken, n=1)
            message = f"there is no parameter {name!r}{f'; did you mean {close[0]!r}?' if close else ''}"
            expected = f"one of {', '.join(taken)}" if taken else "no parameter"
            errors.append(FieldError(path=name, message=message, got=echo(given[-1]), expected=expected))
        elif count > 1 and not taken.get(name):
            errors.append(FieldError(path=name, message="it is there twice", got=echo(given), expected="one value"))
    if errors:
        raise invalid(errors)


def _takes_several(annotation: Any) -> bool:
    return list in (get_origin(annotation), *map(get_origin, get_args(annotation)))


def refused_key(conflict: Conflict, key: str | None) -> Exception:
    """Return the answer to a request whose idempotency key was used with another body."""
    if key is None:
        return conflict
    return refuse("Idempotency-Key", str(conflict), key, "a new key, or the body it was first used with")


_JOB_ID = "job_[0-9a-z]{20}"
SweepFilter = Annotated[
    str | None,
    Query(pattern=f"^(none|{_JOB_ID})$", description="jobs of the sweep with this id; `none`: those of no sweep"),
]
NeedsFilter = Annotated[
    str | None,
    Query(pattern=f"^{_JOB_ID}$", description="jobs that use this one: its model, its gate, or run after it"),
]
JobIds = Annotated[
    str,
    Query(
        pattern=f"^{_JOB_ID}(,{_JOB_ID}){{0,99}}$",
        description="ids of jobs, separated by commas, 100 at most; unknown ones are left out",
    ),
]


def split_names(names: str) -> tuple[str, ...]:
    """Return each of the names, or ids, once, in their order."""
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def stream_id(path: str, text: str | None) -> str:
    """Return the id of a job's event; the beginning when absent."""
    if text is None:
        return BEGINNING
    try:
        milliseconds, sequence = parse_id(text)
    except ValueError as error:
        raise refuse(path, str(error), text, "an event id such as 1700000000000-0") from None
    return f"{milliseconds}-{sequence}"


def resume_point(request: Request, after: str | None) -> tuple[str, str] | None:
    """Return the client's position and the name of its parameter: ``Last-Event-ID``, else ``after``, else
    nothing.
    """
    last = request.headers.get("last-event-id")
    if last:
        return "Last-Event-ID", last
    return None if after is None else ("after", after)
