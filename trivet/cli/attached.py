"""Uploads files that ``--set`` names as ``@FILE``, so that one command can submit a spec with its files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trivet.cli.context import client, refuse

_ATTACHED = re.compile(r"(?<![^\[\s,:{])@([^\s,\[\]{}]+)")
"""A bare ``@path`` at the beginning of a value; no unquoted YAML value begins with ``@``."""


def attached(changes: Sequence[str], project: str | None) -> list[str]:
    """Upload the files in changes of a spec (``model.onnx=@mine.onnx``) and return the changes with their ids.
    A file is uploaded once; if one cannot be read, none is uploaded.
    """
    named = {path for change in changes for path in _paths(change)}
    for path in sorted(named):
        if not Path(path).is_file():
            refuse(f"--set: cannot read {path}: it is not a file")
    if not named:
        return list(changes)
    with client() as service:
        ids = {path: service.upload(Path(path), project=project).id for path in sorted(named)}
    return [_with_ids(change, ids) for change in changes]


def _paths(change: str) -> list[str]:
    text = change.partition("=")[2]
    return [text[1:]] if _is_whole(text) else _ATTACHED.findall(text)


def _is_whole(text: str) -> bool:
    """Return whether the value is a single file, whose path may have spaces and commas."""
    return text.startswith("@") and Path(text[1:]).is_file()


def _with_ids(change: str, ids: dict[str, str]) -> str:
    path, equals, text = change.partition("=")
    if _is_whole(text):
        return f"{path}={ids[text[1:]]}"
    return path + equals + _ATTACHED.sub(lambda found: ids[found[1]], text)
