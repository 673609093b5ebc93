"""Carries a rank's reports: its events into a file, its last word to the supervisor.

A connection to the supervisor starts with one greeting line (:func:`_greeting`) that says which rank speaks on which
channel. On ``control`` the rank then sends its last word, a JSON object: ``{"type": "done"}``, the ``error``
event of the exception that ends it, or ``{"type": "terminated"}`` after SIGTERM; the supervisor sends requests
(:mod:`workers.rank.program`). ``stdout`` and ``stderr`` carry raw text.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any, Literal

import orjson

from service.jobs.events import LONGEST_EVENT, LONGEST_TRACEBACK, EventWriter, rank_file
from service.jobs.files import JobPaths
from service.jobs.runtime.run_context import ENDING, WORKING, Reporter

Channel = Literal["control", "stdout", "stderr"]

_COUNTS = frozenset({"metric", "bound", "artifact"})
"""Results are in the file before the rank goes on, so that no checkpoint is ahead of them."""


def _is_result(event: dict[str, Any]) -> bool:
    """Return whether an event is about finished work, and not about preparation."""
    return event["type"] in {"metric", "bound"} or (event["type"] == "progress" and event["done"] > 0)


def _greeting(rank: int, channel: Channel, secret: str) -> bytes:
    """Return the first line of a connection."""
    return orjson.dumps({"rank": rank, "channel": channel, "secret": secret}) + b"\n"


_SEND_BUFFER = 1 << 20
"""The requested buffer in bytes; the kernel may give less. A crashing rank writes its stacks in many small
pieces, and cannot end before its supervisor has read those that do not fit.
"""


def connect(address: str, rank: int, channel: Channel, secret: str) -> socket.socket:
    """Open a channel to the supervisor that listens on the unix socket ``address`` and knows the ``secret`` of the
    group. Raises :class:`OSError`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        connection.connect(address)
        connection.sendall(_greeting(rank, channel, secret))
    except OSError:
        connection.close()
        raise
    return connection


class RankReporter(Reporter):
    """Appends to the rank's file, which its supervisor reads in its own time.

    Raises :class:`OSError` if the file cannot be written; while the disk hangs, the rank waits. Without a
    ``connection`` it has no last word: the rank's own reporter, beside this one, says it.
    """

    def __init__(self, connection: socket.socket | None, rank: int, paths: JobPaths, attempt: int) -> None:
        self._connection, self._rank, self._paths = connection, rank, paths
        self._events = EventWriter(rank_file(paths.attempt(attempt), rank))
        self._phase = ""

    def put(self, event: dict[str, Any]) -> None:
        """Append one event to the rank's file; results are there before the rank goes on. Of an event that is longer
        than any reader takes, only a line of the log tells.
        """
        line = self._line(event)
        if len(line) > LONGEST_EVENT:
            said = f"a {event['type']} event of {len(line)} bytes was left out: at most {LONGEST_EVENT} are recorded"
            line = self._line({"type": "log", "stream": "service", "line": said})
        self._events.append(line, counts=event["type"] in _COUNTS)
        if self._phase and _is_result(event):
            self.phase(WORKING)

    def phase(self, name: str) -> None:
        """Report a new phase, on rank 0 only, for the whole job.

        Its first result ends the preparation; after that only the end can follow.
        """
        is_over = self._phase == ENDING or (self._phase == WORKING and name != ENDING)
        if self._rank == 0 and name != self._phase and not is_over:
            self._phase = name
            super().phase(name)

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        """Announce a finished file or folder. Its name is its path relative to the job's artifact folder, or,
        elsewhere in the job's folder (a checkpoint), relative to that folder. Raises :class:`ValueError` outside.
        """
        resolved = path.resolve()
        for home in (self._paths.artifacts.resolve(), self._paths.root.resolve()):
            if resolved.is_relative_to(home) and resolved != home:
                name = resolved.relative_to(home).as_posix()
                self.put({"type": "artifact", "name": name, "media_type": media_type})
                return
        raise ValueError(f"artifact {path}: only files below the job's folder {self._paths.root} can be announced")

    def error(self, error: str, message: str, traceback: str, *, final: bool = False) -> None:
        """Report the exception that ends this rank; ``error`` is its class name, ``traceback`` may be empty, and
        ``final`` says that another attempt would fail alike.
        """
        kept = {"message": message[:LONGEST_TRACEBACK], "traceback": traceback[-LONGEST_TRACEBACK:]}
        self._send({"type": "error", "error": error, **kept, "final": final})

    def terminated(self) -> None:
        """Tell the supervisor that SIGTERM ends this rank, and when it arrived."""
        self._send({"type": "terminated"})

    def done(self) -> None:
        """Tell the supervisor that the rank ended well and that all its events are on disk."""
        self._events.flush()
        self._send({"type": "done"})

    def flush(self) -> None:
        """Flush the reports to the file, if it can still be written."""
        with contextlib.suppress(OSError):
            self._events.flush()

    def _send(self, word: dict[str, Any]) -> None:
        """Send a last word; nothing happens if the supervisor has gone."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(self._line(word))

    def _line(self, event: dict[str, Any]) -> bytes:
        return orjson.dumps(
            {**event, "time": time.time(), "rank": self._rank},
            default=repr,
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE,
        )
