"""Defines the reports of a running job, in the form that travels from a rank to the API.

A rank appends one JSON object a line to a file of its own (:mod:`service.jobs.events.record_files`); its supervisor
relays batches into the job's stream, fenced by the attempt number. Every event has ``type``, ``time`` (Unix seconds,
float) and ``rank`` (``None`` for the service itself); the other fields depend on the type.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, TypedDict, Union, cast, get_args, get_origin, get_type_hints

import orjson

from service.jobs.events.bounds_row import BoundsRow
from service.jobs.events.rank_words import OddWord, read_object
from service.jobs.text import shortened

EventType = Literal["state", "metric", "bound", "search", "span", "log", "artifact", "progress", "phase", "error"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
RECORDED_ONLY = frozenset({"tree"})
"""Types of events that are recorded but in no stream: they are large, and read on demand."""
STREAM_PING_S = 15.0
"""Longest silence of a stream of events, in seconds: without events it sends a ping."""


class Event(TypedDict):
    """Fields common to all events."""

    type: EventType
    time: float
    rank: int | None


class StateEvent(Event):
    state: str
    attempt: int
    reason: NotRequired[str]


class MetricEvent(Event):
    """Values of one step; names as in the interface (``loss``, ``tokens_per_s``, …)."""

    step: int
    values: dict[str, float]


class SearchEvent(Event):
    """The state of the search for one instance's verdict ``seconds`` after its start: subdomains bounded so far
    and still open, and the proved lower bound of the margin over all of them (``None`` without one).
    """

    instance: int
    domains: int
    open: int
    bound: float | None
    seconds: float


class TreeEvent(Event):
    """The splits of the searches for one instance's verdict so far: ``searches`` are those of ``api/routes/tree.py``.
    It stays in the record, where the API reads it; the stream does not carry it.

    ``ranks`` searched together; the trees have the domains of the reporting rank.
    """

    instance: int
    domains: int
    seconds: float
    ranks: int
    searches: list[dict[str, Any]]


class SpanEvent(Event):
    """A timed piece of work, for timelines; ``start`` and ``end`` in Unix seconds."""

    name: str
    start: float
    end: float
    detail: NotRequired[dict[str, Any]]


class LogEvent(Event):
    """A printed line. A ``live`` one tells followers about lines that they do not get, and is not part of the log."""

    stream: Literal["stdout", "stderr", "service"]
    line: str
    live: NotRequired[bool]


class ArtifactEvent(Event):
    """A file in the job's artifact folder; the supervisor adds ``bytes`` and ``sha256``."""

    name: str
    media_type: str
    bytes: NotRequired[int]
    sha256: NotRequired[str]


class ProgressEvent(Event):
    """Progress, with the fields of :class:`service.jobs.records.Progress`."""

    done: int
    total: int
    unit: str
    share: NotRequired[float | None]
    phase: NotRequired[str | None]
    left_s: NotRequired[float | None]


class PhaseEvent(Event):
    """The beginning of the phase ``name``, as :class:`service.jobs.records.JobPhase` lists it."""

    name: str


class ErrorEvent(Event):
    """Reports the exception that ended a rank; ``error`` is its class name, ``traceback`` is empty if it would
    not help, and ``final`` says that another attempt would fail alike.
    """

    error: str
    message: str
    traceback: str
    final: NotRequired[bool]


LONGEST_REPORT = 256 << 10
"""Most bytes of an event that is no row of bounds, tree or error."""
LONGEST_MESSAGE = 4000
"""The most characters of an error's message in the job's record."""
LONGEST_TRACEBACK = 1 << 18
"""The most characters of the end of a traceback."""
LONGEST_WORDS = 200
"""The most characters of a name, and of a progress report, which is in the job's record and in every list of jobs."""
LATEST = 253_402_300_799.0
"""The last second of the year 9999, in Unix seconds: a later one is invalid."""
MOST_UNITS = 2**53
"""The largest whole number in an event: every reader of JSON has it exactly."""
_LONG = frozenset({"bound", "tree", "error"})
_SHOWN = 200


def _json_types(annotation: Any) -> tuple[type, ...]:
    """Return the types that ``orjson.loads`` may return for a value with this annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:
        return tuple(kind for argument in arguments for kind in _json_types(argument))
    if origin is Literal:
        return tuple({type(argument) for argument in arguments})
    kind = origin or annotation
    return (int, float) if kind is float else (kind,)


BOUND_FIELDS = {name: _json_types(annotation) for name, annotation in get_type_hints(BoundsRow).items()}
"""The fields of a ``bound`` event, which are those of the row that it carries, and the JSON types of each."""

_STREAMS = get_args(get_type_hints(LogEvent)["stream"])
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "metric": {"step": int, "values": dict},
    "bound": {name: BOUND_FIELDS[name] for name in ("instance", "verdict")},
    "search": {"instance": int, "domains": int, "open": int, "seconds": (int, float)},
    "tree": {"instance": int, "domains": int, "seconds": (int, float), "ranks": int, "searches": list},
    "span": {"name": str, "start": (int, float), "end": (int, float)},
    "log": {"stream": str, "line": str},
    "artifact": {"name": str, "media_type": str},
    "progress": {"done": int, "total": int, "unit": str},
    "phase": {"name": str},
    "error": {"error": str, "message": str, "traceback": str},
}
"""Types that a rank may report, and the fields that each must have. ``state`` is the service's own."""
_OPTIONAL: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "bound": BOUND_FIELDS,
    "progress": {"share": (int, float, NoneType), "phase": (str, NoneType), "left_s": (int, float, NoneType)},
    "error": {"final": bool},
    "search": {"bound": (int, float, NoneType)},
    "span": {"detail": dict},
}
"""Fields that an event may leave out."""


class MalformedEvent(Exception):  # noqa: N818 - names what the line is
    """A line is not an event; the message says why and shows the beginning of ``text``."""

    def __init__(self, reason: str, text: bytes = b"") -> None:
        shown = text[:_SHOWN].decode("utf-8", "replace") + ("…" if len(text) > _SHOWN else "")
        super().__init__(f"malformed event: {reason}: {shown}" if shown else f"malformed event: {reason}")


def parse_event(text: bytes, rank: int | None) -> Event:
    """Return the event in a line, stamped with its rank (its own word if ``rank`` is None). Raises
    :class:`MalformedEvent`.
    """
    event = parse_object(text)
    kind = event.get("type")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise MalformedEvent(f"the type is none of {', '.join(_FIELDS)}", text)
    if len(text) > LONGEST_REPORT and kind not in _LONG:
        raise MalformedEvent(f"a {kind} event of {len(text)} bytes is longer than {LONGEST_REPORT}", text)
    for name, expected in fields.items():
        if not _is_one(event.get(name), expected):
            raise MalformedEvent(f"a {kind} event needs {name!r} ({_names(expected)})", text)
    for name, expected in _OPTIONAL.get(str(kind), {}).items():
        if name in event and not _is_one(event[name], expected):
            raise MalformedEvent(f"{name!r} of a {kind} event is {_names(expected)}", text)
    if said := next((said for wrong, said in _refusals(event) if wrong), ""):
        raise MalformedEvent(said, text)
    if rank is not None or not _is_one(event.get("rank"), int):
        event["rank"] = rank
    if rank is not None and event.get("stream") == "service":
        event["stream"] = "stdout"  # only the service speaks as the service
    return cast(Event, event)


def _is_one(value: Any, expected: type | tuple[type, ...]) -> bool:
    """Return whether a value has one of these JSON types; true and false are no numbers, and whole numbers are such
    that every reader of JSON has exactly.
    """
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return type(value) in kinds and (float in kinds or type(value) is not int or abs(value) <= MOST_UNITS)


def _refusals(event: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    too_long = f"has more than {LONGEST_WORDS} characters"
    match event["type"]:
        case "metric":
            numbers = all(_is_one(each, (int, float, NoneType)) for each in event["values"].values())
            yield not numbers, "the 'values' of a metric event are numbers"
            yield any(len(name) > LONGEST_WORDS for name in event["values"]), f"a name of a metric {too_long}"
        case "log":
            yield event["stream"] not in _STREAMS, f"the 'stream' of a log event is one of {', '.join(_STREAMS)}"
        case "span":
            known = all(0 <= event[name] <= LATEST for name in ("start", "end"))
            yield not known, "'start' and 'end' of a span event are Unix seconds"
            yield len(event["name"]) > LONGEST_WORDS, f"the name of a span {too_long}"
        case "phase":
            yield len(event["name"]) > LONGEST_WORDS, f"the name of a phase {too_long}"
        case "artifact":
            yield len(event["media_type"]) > LONGEST_WORDS, f"the media type of an artifact {too_long}"
        case "progress":
            words = (event.get(name) or "" for name in ("unit", "phase"))
            yield any(len(each) > LONGEST_WORDS for each in words), f"'unit' or 'phase' of a progress event {too_long}"
            yield min(event["done"], event["total"]) < 0, "'done' and 'total' of a progress event are not negative"
            yield not 0 <= (event.get("share") or 0) <= 1, "'share' of a progress event is from 0 to 1"
            yield not 0 <= (event.get("left_s") or 0) <= LATEST, "'left_s' of a progress event is not negative"


def parse_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object with the Unix ``time`` at which it was written, or now if it has none. Raises
    :class:`MalformedEvent`.
    """
    try:
        value = read_object(text)
    except OddWord as error:
        raise MalformedEvent(str(error), text) from None
    moment: Any = value.get("time")
    value["time"] = float(moment) if _is_one(moment, (int, float)) and 0 <= moment <= LATEST else time.time()
    return value


def bounded_error(event: ErrorEvent) -> ErrorEvent:
    """Return a rank's error with texts of bounded length: it is in the job's record and in every list of jobs."""
    error, message, traceback = event["error"], event["message"], event["traceback"]
    if len(traceback) > LONGEST_TRACEBACK:
        traceback = f"[{len(traceback) - LONGEST_TRACEBACK} characters are left out]…{traceback[-LONGEST_TRACEBACK:]}"
    kept = {"error": shortened(error, LONGEST_WORDS), "message": shortened(message, LONGEST_MESSAGE)}
    fields = {name: event.get(name) for name in ("type", "time", "rank")}
    return cast(ErrorEvent, {**fields, **kept, "traceback": traceback, "final": event.get("final", False)})


def event_key(event: Mapping[str, Any]) -> bytes:
    """Return the identity of an event, the same in the record and in the stream."""
    return orjson.dumps(event, option=orjson.OPT_SORT_KEYS)


def _names(expected: type | tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in (expected if isinstance(expected, tuple) else (expected,)))
