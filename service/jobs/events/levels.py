"""Tells how bad a printed line is by its words: ranks print lines, and most say so in the line itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["warning", "error"]
_ERROR = r"\b(\w*error|\w*exception|critical|fatal|traceback)\b"
_WORDS: dict[Level, re.Pattern[str]] = {
    "error": re.compile(_ERROR, re.IGNORECASE),
    "warning": re.compile(rf"\b\w*warn(ing)?s?\b|{_ERROR}", re.IGNORECASE),
}


def is_at_least(level: Level, line: str) -> bool:
    """Return whether a line speaks of something as bad as ``level``, or worse."""
    return _WORDS[level].search(line) is not None


@dataclass(frozen=True)
class LineFilter:
    """Selects printed lines; ``None`` admits all. ``text`` is case-folded, and is found in any case."""

    rank: int | None
    stream: str | None
    text: str | None
    level: Level | None

    def __call__(self, event: Mapping[str, Any]) -> bool:
        return (
            (self.rank is None or event["rank"] == self.rank)
            and (self.stream is None or event["stream"] == self.stream)
            and (self.text is None or self.text in event["line"].casefold())
            and (self.level is None or is_at_least(self.level, event["line"]))
        )
