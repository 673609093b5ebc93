"""Splits a byte stream into lines of bounded length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One line without its end. ``cut`` bytes beyond the bound were thrown away."""

    text: bytes
    cut: int = 0


class LineSplitter:
    """Feed it chunks as they come; memory stays below the bound plus one chunk, whatever the sender does."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._held = b""
        self._cut = 0

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the lines that ``chunk`` completes."""
        *complete, rest = (self._held + chunk).split(b"\n")
        lines = []
        for text in complete:
            lines.append(self._line(text))
            self._cut = 0
        self._held, self._cut = rest[: self._bound], self._cut + max(len(rest) - self._bound, 0)
        return lines

    def finish(self) -> list[Line]:
        """Return the last line, when the stream ended in the middle of one."""
        last = [self._line(self._held)] if self._held or self._cut else []
        self._held, self._cut = b"", 0
        return last

    def _line(self, text: bytes) -> Line:
        return Line(text[: self._bound], self._cut + max(len(text) - self._bound, 0))
