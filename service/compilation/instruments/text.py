"""Shortens PyTorch's messages for reports."""

from __future__ import annotations

import re

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
"""A frame of a stack as text: file, line and function."""


def first_line(text: str) -> str:
    """Return the first line that is not empty, with the next one if it ends in a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
