"""Keeps what ranks print: files that keep it, and a limit on what is relayed live."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from workers.event_protocol import TextLine

LONGEST_LINE = 8192
"""Bytes of a printed line that are kept."""
_TAIL = 20


def printable(line: TextLine) -> str:
    """Return a line as it would stand on a terminal: of a progress bar drawn over itself, the last drawing."""
    text = line.text.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
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
    """A file that grows by what is added to it. Adding costs nothing; :meth:`write` may take as long as the disk does,
    so it belongs in a thread. Raises :class:`OSError` where it fails, and then keeps no more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[bytes] = []
        self._lock = threading.Lock()
        self._failed = False

    def add(self, content: bytes) -> None:
        if not self._failed:
            with self._lock:
                self._pending.append(content)

    @property
    def pending(self) -> int:
        """Bytes that are not in the file yet."""
        with self._lock:
            return sum(map(len, self._pending))

    def write(self) -> None:
        """Bring into the file what was added."""
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            with self._path.open("ab") as file:
                file.writelines(pending)
        except OSError as error:
            self._failed = True
            error.filename = str(self._path)
            raise


class RankLog:
    """Keeps the output of one rank: ``rank-<r>.log`` up to ``file_bytes``, the last lines, and what may go on live."""

    def __init__(self, path: Path, *, file_bytes: int = 256 << 20, rate: float = 200.0, burst: float = 2000.0) -> None:
        self._name = path.name
        self._room = file_bytes
        self.file = GrowingFile(path)
        self._allowance = TokenBucket(rate, burst, time.monotonic())
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

    def close(self) -> list[str]:
        """Return the notice of what was held back last, if anything was."""
        held_back, self._held_back = self._held_back, 0
        return [self._notice(held_back)] if held_back else []

    def _notice(self, lines: int) -> str:
        return f"[{lines} lines were not relayed: too many at once; they are in {self._name}]"

    def _write(self, text: str) -> None:
        if self._room < 0:
            return
        line = text.encode(errors="replace") + b"\n"
        self._room -= len(line)
        self.file.add(b"[the log reached its largest size and ends here]\n" if self._room < 0 else line)
