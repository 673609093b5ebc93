"""Reads what ranks wrote, within limits: JSON objects, and the lines of files that grow.

A rank's file is the rank's: it may have any length, holes, lines without an end. Each reader here has a limit in bytes,
and takes from a file only what one that appends events could have written; what goes beyond is the rank's fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import orjson

LONGEST_EVENT = 4 << 20
"""Most bytes of one event; a bounds row with a counterexample of some 100,000 numbers fits."""
MOST_RECORDED = 8 << 30
"""The bytes of one rank's record that are read."""
_DEEPEST = 64
"""The deepest nesting of what a rank says: JSON of Python, of Lua and of clients gives up at different depths."""
_READ = 1 << 20
Check = Callable[[], None]
"""Called about once a megabyte while a file is read; it ends the reading by an exception."""


def go_on() -> None:
    """Check nothing."""


class OddWord(ValueError):  # noqa: N818 - names what was read
    """A rank wrote something that no reader takes; the message says what is wrong with it."""


class UnreadRest(Exception):  # noqa: N818 - names what is left
    """The rest of a rank's record is not read; the message says why."""


def read_object(text: bytes, most_bytes: int = LONGEST_EVENT) -> dict[str, Any]:
    """Return the JSON object that a rank wrote. Raises :class:`OddWord`."""
    if len(text) > most_bytes:
        raise OddWord(f"{len(text)} bytes are more than {most_bytes}")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise OddWord(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise OddWord("not a JSON object")
    if text.count(b"{") + text.count(b"[") > _DEEPEST and _is_deeper(value, _DEEPEST):
        raise OddWord(f"nested more than {_DEEPEST} deep")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in inner)


def refuse_line(line: bytes) -> None:
    """Raise :class:`UnreadRest` for a line that no writer of events wrote."""
    if len(line) > LONGEST_EVENT:
        raise UnreadRest(f"a line has more than {LONGEST_EVENT} bytes")
    if b"\0" in line:
        raise UnreadRest("it has a hole, or a zero byte")


def lines(file: IO[bytes], check: Check = go_on) -> Iterator[bytes]:
    """Yield the whole lines of a file, with their ends. Raises :class:`UnreadRest`."""
    taken, checked = 0, 0
    while line := file.readline(LONGEST_EVENT + 1):
        taken += len(line)
        if taken - checked > _READ:
            check()
            checked = taken
        refuse_line(line.removesuffix(b"\n"))
        if taken > MOST_RECORDED:
            raise UnreadRest(f"it has more than {MOST_RECORDED} bytes")
        if line.endswith(b"\n"):
            yield line


def lines_backwards(file: IO[bytes], check: Check = go_on) -> Iterator[bytes]:
    """Yield the whole lines of a file without their ends, the last one first. Raises :class:`UnreadRest`."""
    size = left = file.seek(0, os.SEEK_END)
    held, ends_whole = b"", False
    while left:
        check()
        if size - left > MOST_RECORDED:
            raise UnreadRest(f"it has more than {MOST_RECORDED} bytes")
        length = min(_READ, left)
        left = file.seek(left - length)
        held, *whole = (file.read(length) + held).split(b"\n")
        if not ends_whole and whole:
            whole.pop()  # after the last line feed comes an unfinished line, or nothing
            ends_whole = True
        for line in reversed(whole):
            refuse_line(line)
            yield line
        refuse_line(held)
    if ends_whole and held:
        yield held
