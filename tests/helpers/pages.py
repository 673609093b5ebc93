"""What the documents show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def console_blocks(text: str) -> list[str]:
    return re.findall(r"```console\n(.*?)```", text, re.DOTALL)


def commands(path: Path) -> list[str]:
    """Return what a document's console blocks have after a prompt."""
    lines = [line for block in console_blocks(path.read_text()) for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]
