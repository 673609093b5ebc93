"""What ranks print: files that keep it, and a limit on what is relayed live."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import IO

from workers.lines import Line

LONGEST_LINE = 8192
"""Bytes of a printed line that are kept."""
_TAIL = 20


def printable(line: Line) -> str:
    """A line as it would stand on a terminal: of a progress bar drawn over itself, the last drawing."""
    text = line.text.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    return f"{text} … [{line.cut} more bytes]" if line.cut else text


class Allowance:
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


class RankLog:
    """The output of one rank: ``rank-<r>.log`` up to ``file_bytes``, the last lines, and what may go on live."""

    def __init__(self, path: Path, *, file_bytes: int = 256 << 20, rate: float = 200.0, burst: float = 2000.0) -> None:
        self._path = path
        self._room = file_bytes
        self._file: IO[str] | None = path.open("a", encoding="utf-8", errors="replace")
        self._allowance = Allowance(rate, burst, time.monotonic())
        self._held_back = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)

    def add(self, text: str) -> list[str]:
        """Keep a line; the lines to relay for it (none when over the limit, with a notice once there is room)."""
        self.tail.append(text)
        self._write(text)
        if not self._allowance.take(time.monotonic()):
            self._held_back += 1
            return []
        held_back, self._held_back = self._held_back, 0
        return [self._notice(held_back), text] if held_back else [text]

    def flush(self) -> None:
        """Bring what was printed into the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.flush()

    def close(self) -> list[str]:
        """Close the file; the notice of what was held back last, if anything was."""
        self._close_file()
        held_back, self._held_back = self._held_back, 0
        return [self._notice(held_back)] if held_back else []

    def _notice(self, lines: int) -> str:
        return f"[{lines} lines were not relayed: too many at once; they are in {self._path.name}]"

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        self._room -= len(text) + 1
        full = self._room < 0
        try:
            self._file.write("[the log reached its largest size and ends here]\n" if full else text + "\n")
        except OSError:
            full = True  # a full disk ends the file, not the job
        if full:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
