"""Keeps the record of an attempt on disk: the reports of its ranks and supervisors, in one append-only file each.

A rank writes its own file, so no fault of its supervisor, the broker or the network loses an event. The
supervisor relays the file into the job's stream; the API reads the files, and the stream for events that they lack.
"""

from __future__ import annotations

import fnmatch
import heapq
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from service.jobs.events.event import Event, MalformedEvent, parse_event
from service.jobs.events.packed import PACKED, open_record, record_sizes
from service.jobs.events.rank_words import Check, UnreadRest, go_on, lines, lines_backwards, refuse_line
from service.jobs.files import Folder

_READ = 1 << 20
_MOST_READS = 16
"""Most reads of one call; the next call continues an unfinished line, so the caller may stop in between."""
_BUFFERED = 1 << 16
_FLUSH_S = 0.1
_RANK = re.compile(r"events\.rank-(\d+)\.jsonl")


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's events in the folder of its attempt."""
    return folder / f"events.rank-{rank}.jsonl"


def host_file(folder: Path, host: str, *, leads: bool) -> Path:
    """Return the path of the events that a host's supervisor reported itself.

    The leading host's file has the plain name. Each host has its own file, since appends of several hosts to one
    could interleave.
    """
    return folder / ("events.jsonl" if leads else f"events.{host}.jsonl")


def log_file(folder: Path, rank: int) -> Path:
    """Return the path of the first lines that a rank printed, in the folder of its attempt."""
    return folder / f"log.rank-{rank}.jsonl"


def log_segment(folder: Path, rank: int, before: int) -> Path:
    """Return the path of further lines of a rank, after a number of earlier ones."""
    return folder / f"log.rank-{rank}.{before:015d}.jsonl"


class EventWriter:
    """Appends lines to a file from any thread. An important line is in the file when :meth:`append` returns;
    others follow within a tenth of a second. Raises :class:`OSError` if the file cannot be written, at the
    latest in the next call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._error: OSError | None = None
        threading.Thread(target=self._flush_soon, name="trivet-events", daemon=True).start()

    def append(self, line: bytes, *, counts: bool) -> None:
        with self._lock:
            self._raise()
            self._buffer += line
            if counts or len(self._buffer) > _BUFFERED:
                self._write()
        self._raise()
        self._wake.set()

    def flush(self) -> None:
        with self._lock:
            self._write()
        self._raise()

    def _flush_soon(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(_FLUSH_S)
            self._wake.clear()
            with self._lock:
                self._write()

    def _write(self) -> None:
        """Write the buffer; after an error write nothing more, lest a torn line be continued."""
        try:
            while self._buffer and self._error is None:
                del self._buffer[: os.write(self._file, self._buffer)]
        except OSError as error:
            error.filename = str(self._path)
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class EventReader:
    """Follows a rank's file while it grows."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self.rank = path, rank
        self._file: IO[bytes] | None = None
        self._held = b""
        self.taken = 0
        """Bytes of the returned whole lines."""
        self.has_more = False
        """Whether the last call stopped before the end."""
        self.unread: UnreadRest | None = None
        """Why nothing more is read, once something in the file was not written by a writer of events."""

    def open(self) -> None:
        """Hold the file from now on, if it exists: a later file of that name is not read."""
        if self._file is None:
            self._file = _opened(self._path)

    def read(self) -> list[bytes]:
        """Return some of the whole lines appended since the last call; none if there are none, or if
        :attr:`has_more` says that a line is not whole yet. May block as long as the disk does.
        """
        self.open()
        for _ in range(_MOST_READS):
            chunk = self._file.read(_READ) if self._file is not None and self.unread is None else b""
            self.has_more = bool(chunk)
            if not chunk:
                return []
            *whole, self._held = (self._held + chunk).split(b"\n")
            found = list(self._take_lines(whole))
            if found:
                return found
        return []

    def _take_lines(self, whole: list[bytes]) -> Iterator[bytes]:
        """Yield lines up to the first one that no writer of events wrote; after it, none is read any more."""
        try:
            for line in whole:
                refuse_line(line)
                self.taken += len(line) + 1
                yield line
            refuse_line(self._held)
        except UnreadRest as rest:
            self.unread, self.has_more, self._held = rest, False, b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def attempt_folders(attempts: Path) -> dict[int, Path]:
    """Return the folders of those attempts that have one, by number."""
    return dict(sorted((int(name), attempts / name) for name in _names(attempts) if name.isdecimal()))


def recorded(folder: Path, types: Collection[str], check: Check = go_on) -> Iterator[dict[str, Any]]:
    """Yield the events of an attempt of these types, ordered by time as far as each file is. Where the rest of a rank's
    file is not read, a line of the log says so.
    """
    logs = [_printed(chain, check) for chain in _log_chains(folder)] if "log" in types else []
    events = [_events(path, types, check) for path in _event_files(folder)]
    yield from heapq.merge(*events, *logs, key=itemgetter("time"))


def newest_logged(folder: Path, check: Check = go_on) -> Iterator[dict[str, Any]]:
    """Yield the ``log`` events of an attempt, the newest first, reading from the ends of its files: the first ones come
    at once, however long the log is.
    """
    chains = [*_log_chains(folder), *([path] for path in _event_files(folder))]
    newest = [_logged_backwards(chain, check) for chain in chains]
    yield from heapq.merge(*newest, key=itemgetter("time"), reverse=True)


def _log_chains(folder: Path) -> list[list[Path]]:
    """Return the files of each rank's output, in the order in which they were written."""
    chains: dict[str, list[Path]] = {}
    names = fnmatch.filter(_names(folder), "log.rank-*.jsonl")
    for name in sorted(names, key=lambda name: (len(name), name)):
        chains.setdefault(name.split(".")[1], []).append(folder / name)
    return list(chains.values())


def _event_files(folder: Path) -> list[Path]:
    return [folder / name for name in fnmatch.filter(_names(folder), "events*.jsonl")]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, those of packed files too, in order; none if it is missing or not a folder."""
    try:
        with Folder.open(folder) as opened:
            names = set(opened.names())
            with suppress(OSError):
                names.update(record_sizes(opened))
            return sorted(names)
    except OSError:
        return []


def _printed(chain: list[Path], check: Check) -> Iterator[dict[str, Any]]:
    """Yield the lines that a rank printed; a notice with their number replaces lines beyond the limit."""
    count = 0
    for path in chain:
        before = int(path.name.split(".")[2]) if path.name.count(".") == 3 else 0
        lacking = before - count
        for event in _events(path, ("log",), check):
            if lacking > 0:
                told = f"[{lacking} lines are missing: the log reached its largest size]"
                yield {**event, "stream": "service", "line": told}
                lacking = 0
            count = max(count, before) + 1
            before = 0
            yield event


def _logged_backwards(chain: list[Path], check: Check) -> Iterator[dict[str, Any]]:
    """Yield the ``log`` events of a chain of files, the newest first, up to where the rest is not read."""
    for path in reversed(chain):
        if not (yield from _events(path, ("log",), check, lines_backwards, _changed_at(path))):
            return


ReadLines = Callable[[IO[bytes], Check], Iterator[bytes]]


def _events(
    path: Path, types: Collection[str], check: Check, read: ReadLines = lines, time: float = 0.0
) -> Generator[dict[str, Any], None, bool]:
    """Yield the events of one file; other lines, which a rank may write, are left out. Return whether all was read:
    a line of the log, of the last event's ``time``, says that the rest is not.
    """
    rank, file = _rank_of(path), _opened(path)
    if file is None:
        return True
    with file:
        try:
            for event in _parsed(read(file, check), rank, types):
                time = event["time"]
                yield event
        except UnreadRest as rest:
            if "log" in types:
                yield _unread(rest, rank, time)
            return False
    return True


def _parsed(found: Iterable[bytes], rank: int | None, types: Collection[str]) -> Iterator[dict[str, Any]]:
    marks = [f'"{name}"'.encode() for name in types]  # parsing takes longer than searching
    for line in found:
        if any(mark in line for mark in marks):
            try:
                event: Event = parse_event(line, rank)
            except MalformedEvent:
                continue
            if event["type"] in types:
                yield dict(event)


def _unread(rest: UnreadRest, rank: int | None, time: float) -> dict[str, Any]:
    """Return the line of the log that stands for what is not read."""
    line = unread_words(rest)
    return {"type": "log", "time": time, "rank": rank, "stream": "service", "line": line}


def unread_words(rest: UnreadRest) -> str:
    """Return what is said where the rest of a rank's record is not read."""
    return f"[the rest of what this rank recorded is not read: {rest}]"


def _rank_of(path: Path) -> int | None:
    match = _RANK.fullmatch(path.name)
    return int(match[1]) if match else None


def _opened(path: Path) -> IO[bytes] | None:
    """Open a regular file: a rank could put a link or a pipe in its place. Return None if there is none."""
    try:
        with Folder.open(path.parent) as folder:
            return open_record(folder, path.name)
    except OSError:
        return None


def _changed_at(path: Path) -> float:
    """Return when a file, or what it is packed in, was changed; 0 where the job was deleted meanwhile."""
    with suppress(OSError), Folder.open(path.parent) as folder:
        found = folder.status(path.name) or folder.status(PACKED)
        if found is not None:
            return found.st_mtime
    return 0.0
