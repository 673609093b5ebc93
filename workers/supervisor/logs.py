"""Keeps the output of ranks: all of it on disk up to a limit, and live as much as followers can take."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, Literal

import orjson

from service.jobs.events import LogEvent, log_file, log_segment
from service.jobs.files import Folder
from service.jobs.settings import MAX_LOG_BYTES
from workers.event_protocol import TextLine, log_event

LONGEST_LINE = 8192
"""Bytes of a printed line that are kept."""
_TAIL = 20
_SEGMENTS, _FIRST = 8, 2
"""The number of files of a rank's largest log, and how many of the first ones are kept for good."""


def printable(line: TextLine) -> str:
    """Return a line as text, with a notice of what is left out."""
    text = line.text.decode("utf-8", "replace")
    return f"{text} … [{line.cut} more bytes]" if line.cut else text


class TokenBucket:
    """A token bucket: ``rate`` lines a second on average, ``burst`` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class GrowingFile:
    """A file that grows. Adding costs nothing; :meth:`write` may block as long as the disk does, so it belongs in a
    thread.

    Raises :class:`OSError` when it fails, and then keeps no more. It writes by descriptor, so another file that
    takes its name is never written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[bytes] = []
        self._lock = threading.Lock()
        self._failed = False
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Make the file, or reopen one of an earlier start, unless it is open; raises as :meth:`write` does."""
        if self._file is None:
            with Folder.open(self._path.parent) as folder:
                self._file = folder.append(self._path.name)
        return self._file

    def close(self) -> None:
        """Let go of the file; a later :meth:`write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, content: bytes) -> None:
        if not self._failed:
            with self._lock:
                self._pending.append(content)

    @property
    def pending(self) -> int:
        """Return the number of bytes that are not in the file yet."""
        with self._lock:
            return sum(map(len, self._pending))

    def write(self) -> None:
        """Write the added bytes to the file."""
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            number, content = self.open().fileno(), memoryview(b"".join(pending))
            while content:
                content = content[os.write(number, content) :]
        except OSError as error:
            self._failed = True
            error.filename = str(self._path)
            raise


class RotatedLog:
    """Keeps the lines of one rank in files of bounded total size: the first quarter of ``most_bytes`` for good, and the
    newest of the rest.

    The names of the files say how many lines came before each, so that a gap is seen.
    """

    def __init__(self, folder: Path, rank: int, most_bytes: int) -> None:
        self._folder, self._rank = folder, rank
        self._segment_bytes = max(most_bytes // _SEGMENTS, 1)
        self._room = max(most_bytes // _SEGMENTS * _FIRST, 1)
        self._lines = 0
        self._first = GrowingFile(log_file(folder, rank))
        self._newest: deque[tuple[Path, GrowingFile]] = deque()
        self._abandoned: list[tuple[Path, GrowingFile]] = []
        self._lock = threading.Lock()

    def add(self, line: bytes) -> None:
        """Take a line, which :meth:`write` writes to disk."""
        with self._lock:
            if len(line) > self._room:
                self._begin_segment()
            (self._newest[-1][1] if self._newest else self._first).add(line)
            self._room -= len(line)
            self._lines += 1

    def open(self) -> None:
        """Make the first file. Raises :class:`OSError`."""
        self._first.open()

    @property
    def pending(self) -> int:
        """Return the number of bytes that are not in the files yet."""
        return sum(file.pending for file in self._files())

    def write(self) -> None:
        """Write the added lines to disk, and remove those beyond the limit.

        May block as long as the disk does. Raises :class:`OSError` if a file cannot be written.
        """
        with self._lock:
            abandoned, self._abandoned = self._abandoned, []
        for path, segment in abandoned:
            segment.close()
            with Folder.open(path.parent) as folder:
                folder.unlink(path.name)
        for file in self._files():
            file.write()

    def _files(self) -> list[GrowingFile]:
        with self._lock:
            return [self._first, *(file for _, file in self._newest)]

    def _begin_segment(self) -> None:
        path = log_segment(self._folder, self._rank, self._lines)
        self._newest.append((path, GrowingFile(path)))
        self._room = self._segment_bytes
        if len(self._newest) > _SEGMENTS - _FIRST:
            self._abandoned.append(self._newest.popleft())


class RankLog:
    """Keeps the output of one rank, and decides what to relay live."""

    def __init__(
        self, folder: Path, rank: int, *, most_bytes: int = MAX_LOG_BYTES, rate: float = 200.0, burst: float = 2000.0
    ) -> None:
        self._rank = rank
        self.file = RotatedLog(folder, rank, most_bytes)
        self._allowance = TokenBucket(rate, burst, time.monotonic())
        self._held_back = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)

    def add(self, text: str, stream: Literal["stdout", "stderr"]) -> list[LogEvent]:
        """Keep a line; return the lines to relay: none over the limit, and a notice once there is room."""
        self.tail.append(text)
        event = log_event(text, stream, self._rank)
        self.file.add(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
        if not self._allowance.take(time.monotonic()):
            self._held_back += 1
            return []
        return [*self.close(), event]

    def close(self) -> list[LogEvent]:
        """Return the notice of the last lines that were held back, if any."""
        held_back, self._held_back = self._held_back, 0
        if not held_back:
            return []
        told = f"[{held_back} lines were not relayed: too many at once; the job's log has them]"
        notice = log_event(told, rank=self._rank)
        notice["live"] = True
        return [notice]
