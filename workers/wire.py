"""Checks what arrives on the event socket: greetings and events are input like any other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, cast

import orjson

from service.jobs.events import Event, LogEvent
from service.jobs.reporting import Channel
from workers.lines import Line

LONGEST_EVENT = 4 << 20
"""Bytes of one event; a bounds row with a counterexample of some 100,000 numbers fits."""
LONGEST_GREETING = 1024
_SHOWN = 200

_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "metric": {"step": int, "values": dict},
    "bound": {"instance": int, "verdict": str},
    "search": {"instance": int, "domains": int, "open": int, "seconds": (int, float)},
    "span": {"name": str, "start": (int, float), "end": (int, float)},
    "log": {"stream": str, "line": str},
    "artifact": {"name": str, "media_type": str},
    "progress": {"done": int, "total": int, "unit": str},
    "error": {"error": str, "message": str, "traceback": str},
}
"""Types that a rank may send, and the fields that each must have. ``state`` is the service's own."""
_OPTIONAL: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "bound": {
        "name": (str, NoneType),
        "lower": list,
        "upper": list,
        "margin": (int, float, NoneType),
        "method": str,
        "seconds": (int, float),
        "domains": int,
        "counterexample": (list, NoneType),
    },
    "search": {"bound": (int, float, NoneType)},
    "span": {"detail": dict},
}
"""Fields that an event may leave out."""


class Malformed(Exception):  # noqa: N818 - names what the line is
    """A line is no event; the message says why and shows its beginning."""


@dataclass(frozen=True)
class Greeting:
    rank: int
    channel: Channel
    secret: str
    """That of the group, which :class:`workers.admission.Admission` checks."""


@dataclass(frozen=True)
class Done:
    """A rank's last word: it is about to exit because its work is done."""


@dataclass(frozen=True)
class Terminated:
    """A rank's last word: SIGTERM arrived there at ``time`` (Unix seconds)."""

    time: float


def parse_greeting(text: bytes) -> Greeting:
    match _object(text):
        case {"rank": int(rank), "channel": "events" | "stdout" | "stderr" as channel, "secret": str(secret)} if (
            0 <= rank < 1 << 20
        ):
            return Greeting(rank, cast(Channel, channel), secret)
    raise Malformed("a connection starts with its rank, its channel and the secret of its group")


def parse_event(line: Line, rank: int) -> Event | Done | Terminated:
    """The event in ``line``, stamped with the rank that the connection belongs to. Raises :class:`Malformed`."""
    if line.cut:
        raise _malformed(f"an event of {len(line.text) + line.cut} bytes is longer than {LONGEST_EVENT}", line.text)
    event = _object(line.text)
    kind = event.get("type")
    moment = event.get("time")
    event["time"] = float(moment) if isinstance(moment, (int, float)) else time.time()
    if kind == "done":
        return Done()
    if kind == "terminated":
        return Terminated(event["time"])
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise _malformed(f"the type is none of {', '.join(_FIELDS)}", line.text)
    for name, expected in fields.items():
        if not isinstance(event.get(name), expected):
            raise _malformed(f"a {kind} event needs {name!r} ({_names(expected)})", line.text)
    for name, expected in _OPTIONAL.get(str(kind), {}).items():
        if name in event and not isinstance(event[name], expected):
            raise _malformed(f"{name!r} of a {kind} event is {_names(expected)}", line.text)
    if kind == "metric" and not all(isinstance(value, (int, float, NoneType)) for value in event["values"].values()):
        raise _malformed("the 'values' of a metric event are numbers", line.text)
    event["rank"] = rank
    return cast(Event, event)


def log_event(line: str, stream: Literal["stdout", "stderr", "service"] = "service", rank: int | None = None) -> Event:
    return LogEvent(type="log", time=time.time(), rank=rank, stream=stream, line=line)


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _malformed(f"not JSON ({error})", text) from None
    if not isinstance(value, dict):
        raise _malformed("not a JSON object", text)
    return value


def _names(expected: type | tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in (expected if isinstance(expected, tuple) else (expected,)))


def _malformed(reason: str, text: bytes) -> Malformed:
    shown = text[:_SHOWN].decode("utf-8", "replace")
    return Malformed(f"malformed event: {reason}: {shown}{'…' if len(text) > _SHOWN else ''}")
