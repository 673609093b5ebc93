"""Makes other people's text safe to show and to log.

Names, reasons, errors and printed lines come from other users. In a terminal or a log file their control characters
would act: move the cursor, set the clipboard, start a line that the service never wrote, reorder letters.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from typing import Any

_ACTING = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
"""All C0 and C1 control characters except tab and line feed, DEL, line and paragraph separators, the characters that
change the direction of writing, and surrogates, which no encoding can write.
"""
_SHOWN_AS_ESCAPES = re.compile(f"[\n{_ACTING}]")
_ESCAPED_IN_LINES = re.compile(f"[{_ACTING}]")
_NAMED = {"\n": r"\n", "\r": r"\r"}


LONGEST_TEXT = 1000
"""Most characters of each text in a refusal, since a given value may have any length."""


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Return the text, or its first ``most`` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


def visible(text: str, *, lines: bool = False) -> str:
    """Return ``text`` with the characters that act on a terminal as escapes, such as ``\\x1b``.

    Tabs stay as they are, and with ``lines`` so do line feeds.
    """
    return (_ESCAPED_IN_LINES if lines else _SHOWN_AS_ESCAPES).sub(lambda found: _escape(found[0]), text)


def folded(text: str) -> str:
    """Return ``text`` in the form that searches compare: equal for capitals and small letters of any script,
    and for composed and separate accents.
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).casefold())


def first_control(text: str) -> str | None:
    """Return the first control character of ``text`` as an escape (a tab is one here), or ``None`` if it has none."""
    found = re.search(f"[\t\n{_ACTING}]", text)
    return None if found is None else r"\t" if found[0] == "\t" else _escape(found[0])


def visible_json(value: Any, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON in which no character acts on a terminal; it reads back as the same value."""
    return visible_in_json(json.dumps(value, ensure_ascii=False, indent=indent))


def visible_in_json(text: str) -> str:
    """Return JSON, written by anybody, in which no character acts on a terminal; it reads back as the same value."""
    return _ESCAPED_IN_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class SafeFormatter(logging.Formatter):
    """Formats a record so that no text in it looks like another record: one line, or lines that are set in."""

    def format(self, record: logging.LogRecord) -> str:
        first, *rest = visible(super().format(record), lines=True).split("\n")
        return "\n".join([first, *(f"  {line}" for line in rest)])


def _escape(character: str) -> str:
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
