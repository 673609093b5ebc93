"""The rank's side of the event socket: newline-delimited JSON to the supervisor, sent from a background thread.

A connection starts with one greeting line (:func:`greeting`) that says which rank speaks on which channel.
On ``events`` one JSON object per line follows (see :mod:`service.jobs.events`), at the end ``{"type": "done"}``, or
``{"type": "terminated"}`` where SIGTERM ended the rank; the supervisor answers with requests (:mod:`workers.control`).
``stdout`` and ``stderr`` carry raw text.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson

from service.jobs.layout import JobPaths

Channel = Literal["events", "stdout", "stderr"]

_CAPACITY = 65_536
_EXPENDABLE = frozenset({"log", "span", "metric", "progress", "search"})
"""What may be dropped when a rank reports faster than its supervisor reads; results never are."""
_BATCH = 512


def greeting(rank: int, channel: Channel, secret: str) -> bytes:
    """The first line of a connection."""
    return orjson.dumps({"rank": rank, "channel": channel, "secret": secret}) + b"\n"


def connect(address: str, rank: int, channel: Channel, secret: str) -> socket.socket:
    """Open a channel to the supervisor that listens on the unix socket ``address`` and knows the ``secret`` of the
    group. Raises :class:`OSError`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        connection.sendall(greeting(rank, channel, secret))
    except OSError:
        connection.close()
        raise
    return connection


class SocketReporter:
    """A :class:`service.jobs.runtime.Reporter` whose listener may vanish: then it reports into the void.

    Calls return at once; a daemon thread sends. Call :meth:`close` at the end to flush.
    """

    def __init__(self, connection: socket.socket, rank: int, paths: JobPaths) -> None:
        self._connection = connection
        self._rank = rank
        self._paths = paths
        self._queue: deque[bytes] = deque()
        self._dropped = 0
        self._wake = threading.Condition()
        self._closing = False
        self._sender = threading.Thread(target=self._send, name="trivet-reporter", daemon=True)
        self._sender.start()

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        self._put({"type": "metric", "step": step, "values": {name: float(value) for name, value in values.items()}})

    def bound(self, row: Mapping[str, Any]) -> None:
        self._put({**row, "type": "bound"})

    def search(self, moment: Mapping[str, Any]) -> None:
        self._put({**moment, "type": "search"})

    def span(self, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None) -> None:
        event: dict[str, Any] = {"type": "span", "name": name, "start": start, "end": end}
        self._put(event if detail is None else {**event, "detail": dict(detail)})

    def progress(
        self,
        done: int,
        total: int,
        unit: str,
        *,
        share: float | None = None,
        phase: str | None = None,
        left_s: float | None = None,
    ) -> None:
        event = {"type": "progress", "done": done, "total": total, "unit": unit}
        finer = {"share": share, "phase": phase, "left_s": left_s}
        self._put({**event, **{name: value for name, value in finer.items() if value is not None}})

    def log(self, line: str) -> None:
        self._put({"type": "log", "stream": "service", "line": line})

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        """Announce a finished file or folder. Its name is its path relative to the job's artifact folder, or, for
        what lies elsewhere in the job's folder (a checkpoint), relative to that. Raises :class:`ValueError` outside.
        """
        resolved = path.resolve()
        for home in (self._paths.artifacts.resolve(), self._paths.root.resolve()):
            if resolved.is_relative_to(home) and resolved != home:
                name = resolved.relative_to(home).as_posix()
                self._put({"type": "artifact", "name": name, "media_type": media_type})
                return
        raise ValueError(f"artifact {path}: only files below the job's folder {self._paths.root} can be announced")

    def error(self, error: str, message: str, traceback: str) -> None:
        """Report the exception that ends this rank; ``error`` is its class name, ``traceback`` may be empty."""
        self._put({"type": "error", "error": error, "message": message, "traceback": traceback})

    def terminated(self) -> None:
        """Tell the supervisor that SIGTERM ends this rank, and when it arrived."""
        self._put({"type": "terminated"})

    def close(self, *, done: bool, within_s: float = 10.0) -> None:
        """Flush and hang up. ``done`` says that the rank ended as it should, so its exit is no surprise."""
        if done:
            self._put({"type": "done"})
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._sender.join(within_s)
        self._connection.close()

    def _put(self, event: dict[str, Any]) -> None:
        line = orjson.dumps(
            {**event, "time": time.time(), "rank": self._rank},
            default=repr,
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE,
        )
        with self._wake:
            if len(self._queue) >= _CAPACITY and event["type"] in _EXPENDABLE:
                self._dropped += 1
                return
            self._queue.append(line)
            self._wake.notify()

    def _send(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._connection.sendall(b"".join(batch))
            except OSError:
                return self._discard()
        return None

    def _take(self) -> list[bytes] | None:
        """Wait for lines; ``None`` when closed and drained."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closing)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            dropped, self._dropped = self._dropped, 0
        if dropped:
            batch.append(self._notice(f"{dropped} events were dropped: reported faster than the supervisor reads"))
        return batch or None

    def _notice(self, line: str) -> bytes:
        event = {"type": "log", "stream": "service", "line": line, "time": time.time(), "rank": self._rank}
        return orjson.dumps(event) + b"\n"

    def _discard(self) -> None:
        """Nobody listens any more: forget what is queued, and make every later event expendable at no cost."""
        with self._wake:
            self._queue = deque(maxlen=0)
