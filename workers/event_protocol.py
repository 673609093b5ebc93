"""Defines the messages between a supervisor and the ranks of its group; they are checked like any other input."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, cast

import orjson

from service.jobs.events import ErrorEvent, LogEvent, MalformedEvent, bounded_error, parse_event, parse_object
from service.jobs.runtime import Channel


@dataclass(frozen=True)
class TextLine:
    """One line without its end. ``cut`` bytes beyond the bound were thrown away."""

    text: bytes
    cut: int = 0


class LineSplitter:
    """Feed it chunks as they come; memory stays below the bound plus one chunk, whatever the sender does.

    A line is what a terminal shows of it: what a carriage return has overwritten, as progress bars do, is left out.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._held = b""
        self._cut = 0

    def feed(self, chunk: bytes) -> list[TextLine]:
        """Return the lines that ``chunk`` completes."""
        *complete, rest = (self._held + chunk).split(b"\n")
        lines = []
        for text in complete:
            lines.append(self._line(text))
            self._cut = 0
        begun = self._line(rest)
        self._held, self._cut = begun.text + (b"\r" if rest.endswith(b"\r") else b""), begun.cut
        return lines

    def finish(self) -> list[TextLine]:
        """Return the last line, when the stream ended in the middle of one."""
        last = self._line(self._held)
        self._held, self._cut = b"", 0
        return [last] if last != TextLine(b"") else []

    def _line(self, text: bytes) -> TextLine:
        _, overwritten, shown = text.rstrip(b"\r").rpartition(b"\r")
        cut = 0 if overwritten else self._cut
        return TextLine(shown[: self._bound], cut + max(len(shown) - self._bound, 0))


STOP = b'{"type":"stop"}\n'
"""The line with which a supervisor asks a rank to end its work early."""
LONGEST_WORD = 4 << 20
"""Bytes of a rank's last word, which may hold a traceback."""
LONGEST_GREETING = 1024


@dataclass(frozen=True)
class Greeting:
    rank: int
    channel: Channel
    secret: str
    """The secret of the group, which :class:`workers.supervisor.rank_socket.Admission` checks."""


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


def parse_last_word(line: TextLine, rank: int) -> ErrorEvent | Done | Terminated:
    """Parse a rank's last word. Raises :class:`MalformedEvent`."""
    word = parse_object(line.text)
    match word.get("type"):
        case "done":
            return Done()
        case "terminated":
            return Terminated(word["time"])
        case "error":
            return bounded_error(cast(ErrorEvent, parse_event(line.text, rank)))
    raise MalformedEvent("a rank's last word is done, terminated or error", line.text)


def log_event(
    line: str, stream: Literal["stdout", "stderr", "service"] = "service", rank: int | None = None
) -> LogEvent:
    return LogEvent(type="log", time=time.time(), rank=rank, stream=stream, line=line)


def end_early(reason: str) -> bytes:
    """Return the line with which a supervisor asks a rank to end the job as a success, without the rest of its work."""
    return orjson.dumps({"type": "end", "reason": reason}) + b"\n"


def lease_until(deadline: float) -> bytes:
    """Return the line by which a supervisor lets a rank live until ``deadline`` (:func:`service.linux.uptime`)."""
    return orjson.dumps({"type": "lease", "until": deadline}) + b"\n"
