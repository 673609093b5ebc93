"""Writes the standard output and standard error of every command."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from service.jobs.text import visible, visible_in_json, visible_json

_UNCUT = 10_000


class Terminal(Console):
    """A console that treats text only as text: it has no markup, and shows control characters visibly.

    Strings are one line each: a line feed in one is shown as ``\\n``. Text of several lines goes through
    :meth:`block`. Tables are fitted to a terminal, or to ``COLUMNS``; in a file or a pipe they are as wide as
    their content.
    """

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(
            stderr=stderr, file=file, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False
        )
        if width is None and not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNCUT

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text to lay out, made visible before its width is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything, with all control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, lines=True), segment.style)

    def block(self, text: str, *, style: str | Style | None = None, indent: int = 0) -> None:
        """Print text of several lines; lines after the first are indented by ``indent`` columns."""
        first, *rest = text.split("\n")
        self.print(first, style=style)
        for line in rest:
            self.print(" " * indent + line, style=style)

    def write_line(self, text: str, *, at_once: bool = False) -> None:
        """Print one line without layout: for output of any length, and for other programs."""
        self.file.write(f"{visible(text)}\n")
        if at_once:
            self.file.flush()

    def write_json_text(self, text: str) -> None:
        """Print one line that is already JSON, so that it reads back as the same value."""
        self.file.write(f"{visible_in_json(text)}\n")

    def write_json(self, value: Any) -> None:
        """Print one JSON document."""
        self.file.write(f"{visible_json(value, indent=2)}\n")

    def write_json_line(self, value: Any) -> None:
        """Print JSON on one line, at once."""
        self.file.write(f"{visible_json(value)}\n")
        self.file.flush()


def paragraph(text: str) -> Text:
    """Return text of several lines for a cell of a table, each made visible."""
    return Text("\n".join(visible(line) for line in text.split("\n")))
