"""Read the header of a safetensors file: a length of eight bytes, then as much JSON.

Source: the format's description in https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from typing import IO

LARGEST = 2**25
"""Number of bytes of the largest header that is read."""
_OF_TORCH = (b"PK\x03\x04", b"\x80")
"""Beginnings of what ``torch.save`` writes: a zip file, or a pickle."""


class TensorHeaderError(ValueError):
    """The file is not of safetensors; the message is the end of a sentence about it."""


def shapes_in(content: IO[bytes], size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name. ``content`` stands at its beginning, ``size`` is in bytes.

    Raises :class:`TensorHeaderError`.
    """
    head = content.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(LARGEST, size - 8):
        if head.startswith(_OF_TORCH):
            raise TensorHeaderError("is a file of torch.save (.pt, .pt2), not of safetensors")
        raise TensorHeaderError(f"is no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(content.read(length))
        return {name: tuple(map(int, each["shape"])) for name, each in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorHeaderError(f"is no safetensors file: {error!r}") from error
