"""Tells how bad a printed line is by its words: ranks print lines, and most say so in the line itself."""

from __future__ import annotations

import re
from typing import Literal

Level = Literal["warning", "error"]
_ERROR = r"\b(\w*error|\w*exception|critical|fatal|traceback)\b"
_WORDS: dict[Level, re.Pattern[str]] = {
    "error": re.compile(_ERROR, re.IGNORECASE),
    "warning": re.compile(rf"\b\w*warn(ing)?s?\b|{_ERROR}", re.IGNORECASE),
}


def is_at_least(level: Level, line: str) -> bool:
    """Return whether a line speaks of something as bad as ``level``, or worse."""
    return _WORDS[level].search(line) is not None
