"""What a supervisor and the ranks of its group say to each other; what arrives is checked like any other input."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, cast

import orjson

from service.jobs.events import ErrorEvent, Event, LogEvent, MalformedEvent, parse_event, parse_object
from service.jobs.reporting import Channel
from workers.line_splitter import Line

STOP = b'{"type":"stop"}\n'
"""The line that a supervisor sends to a rank that shall end its work early."""
LONGEST_WORD = 4 << 20
"""Bytes of a rank's last word, which may hold a traceback."""
LONGEST_GREETING = 1024


@dataclass(frozen=True)
class Greeting:
    rank: int
    channel: Channel
    secret: str
    """That of the group, which :class:`workers.supervisor.admission.Admission` checks."""


@dataclass(frozen=True)
class Done:
    """A rank's last word: it is about to exit because its work is done."""


@dataclass(frozen=True)
class Terminated:
    """A rank's last word: SIGTERM arrived there at ``time`` (Unix seconds)."""

    time: float


def parse_greeting(text: bytes) -> Greeting:
    match parse_object(text):
        case {"rank": int(rank), "channel": "control" | "stdout" | "stderr" as channel, "secret": str(secret)} if (
            0 <= rank < 1 << 20
        ):
            return Greeting(rank, cast(Channel, channel), secret)
    raise MalformedEvent("a connection starts with its rank, its channel and the secret of its group")


def parse_last_word(line: Line, rank: int) -> ErrorEvent | Done | Terminated:
    """Parse what a rank says before it ends. Raises :class:`MalformedEvent`."""
    word = parse_object(line.text)
    match word.get("type"):
        case "done":
            return Done()
        case "terminated":
            return Terminated(word["time"])
        case "error":
            return cast(ErrorEvent, parse_event(line.text, rank))
    raise MalformedEvent("a rank's last word is done, terminated or error", line.text)


def log_event(line: str, stream: Literal["stdout", "stderr", "service"] = "service", rank: int | None = None) -> Event:
    return LogEvent(type="log", time=time.time(), rank=rank, stream=stream, line=line)


def lease_until(deadline: float) -> bytes:
    """Return the line by which a supervisor lets a rank live until ``deadline`` (:func:`workers.uptime.uptime`)."""
    return orjson.dumps({"type": "lease", "until": deadline}) + b"\n"
