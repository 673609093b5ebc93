"""Keeps the older part of the audit log: append-only files of JSON lines in the data folder, limited in size."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from service.jobs.files import flush
from service.jobs.records.audit import AuditHead

_FILE_BYTES = 4 << 20
"""A larger file gets no more entries."""


@dataclass(frozen=True)
class AuditFiles:
    """Files are named after the first entry in them, so that their names sort by age. Only the holder of the
    lock writes; others may read meanwhile, as far as the last line feed.
    """

    folder: Path
    max_bytes: int

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Yield whether this process may write; ``False`` while another does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def head(self) -> AuditHead:
        """Return the newest entry that is in the files."""
        for path in reversed(self._paths()):
            if lines := _whole_lines(path):
                last = orjson.loads(lines[-1])
                return AuditHead(number=last["number"], hash=last["hash"])
        return AuditHead()

    def append(self, first: int, lines: Sequence[bytes]) -> None:
        """Append entries, numbered from ``first`` on, and force them to disk. The incomplete line of
        a killed writer is cut off: that entry is still in the stream.
        """
        paths = self._paths()
        path = paths[-1] if paths and paths[-1].stat().st_size < _FILE_BYTES else self._path(first)
        is_new = not path.exists()
        with path.open("ab") as file:
            file.truncate(sum(len(line) + 1 for line in _whole_lines(path)))
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            flush(self.folder)

    def delete_oldest(self) -> list[Path]:
        """Delete whole files, the oldest first, until the rest is within ``max_bytes``; the newest stays."""
        paths, gone = self._paths(), []
        total = sum(path.stat().st_size for path in paths)
        for path in paths[:-1]:
            if total <= self.max_bytes:
                break
            total -= path.stat().st_size
            path.unlink()
            gone.append(path)
        return gone

    def newest_first(self, before: int) -> Iterator[bytes]:
        """Yield the entries whose number is less than ``before``, from the newest to the oldest."""
        for path in reversed(self._paths()):
            if _first_number(path) < before:
                yield from reversed(_whole_lines(path))

    def oldest_first(self, after: int) -> Iterator[bytes]:
        """Yield the entries whose number is more than ``after``, and in the first file some that are older."""
        paths = self._paths()
        for index, path in enumerate(paths):
            is_last = index + 1 == len(paths)
            if is_last or _first_number(paths[index + 1]) > after + 1:
                yield from _whole_lines(path)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("audit-*.jsonl"))

    def _path(self, first: int) -> Path:
        return self.folder / f"audit-{first:016d}.jsonl"


def _first_number(path: Path) -> int:
    return int(path.stem.removeprefix("audit-"))


def _whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines; none of a file that was deleted meanwhile because of its age."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
