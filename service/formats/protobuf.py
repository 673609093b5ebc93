"""Counts the fields of a protobuf message from its bytes, before any object is made of it."""

from __future__ import annotations

from functools import cache
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def has_more_fields(content: bytes, descriptor: Any, most: int) -> bool:
    """Return whether a message of this type has more than ``most`` fields, those of the messages within it included.

    An empty message takes two bytes in a file and more than a hundred in memory. Reading ends at the field after
    ``most``. A malformed field ends its message; the parser will refuse it.
    """
    left = most
    open_ = [(0, len(content), descriptor)]
    while open_:
        start, end, kind = open_.pop()
        within = _messages(kind)
        while start < end:
            left -= 1
            if left < 0:
                return True
            key, start = _varint(content, start, end)
            wire = key & 7
            if wire == _VARINT:
                _, start = _varint(content, start, end)
            elif wire == _BYTES:
                length, start = _varint(content, start, end)
                inner = within.get(key >> 3)
                if inner is not None and start + length <= end:
                    open_.append((start, start + length, inner))
                start += length
            elif wire in (_FIXED64, _FIXED32):
                start += 8 if wire == _FIXED64 else 4
            else:
                break
    return False


@cache
def _messages(descriptor: Any) -> dict[int, Any]:
    """Return the fields that are messages, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _varint(content: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the number at ``start`` and its end; the end of the message if it is cut off."""
    if start < end and content[start] < 128:  # nearly all of them
        return content[start], start + 1
    value = shift = 0
    while start < end:
        byte = content[start]
        start += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, start
        shift += 7
        if shift > 63:
            break
    return value, end
