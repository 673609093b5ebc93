"""Checkpoint folders on disk: what counts as complete, publishing, keeping the newest."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.jobs.atomic import flush

META = "meta.json"
FILES = "files"
_UNFINISHED = ".unfinished_"
_PUBLISHED = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    meta: Mapping[str, Any]


def complete(folder: Path) -> list[Checkpoint]:
    """Return complete checkpoints under ``folder``, oldest first; half-written and foreign entries are ignored."""
    if not folder.is_dir():
        return []
    found = (read(path) for path in folder.iterdir())
    return sorted((checkpoint for checkpoint in found if checkpoint is not None), key=lambda found: found.step)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint under ``folder``."""
    return next(reversed(complete(folder)), None)


def read(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or None unless every file that it lists is there in full."""
    matched = _PUBLISHED.fullmatch(path.name)
    if matched is None:
        return None
    try:
        meta = json.loads((path / META).read_bytes())
        intact = all((path / name).stat().st_size == size for name, size in meta[FILES].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(int(matched[1]), path, meta) if intact else None


def require(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``; raises ``ValueError`` unless it is complete."""
    checkpoint = read(path)
    if checkpoint is None:
        raise ValueError(f"{path} is not a complete checkpoint: {META} or a file that it lists is missing or cut short")
    return checkpoint


def working_folder(folder: Path, step: int) -> Path:
    """Return where a checkpoint is written before it is published."""
    return folder / f"{_UNFINISHED}step_{step}"


def publish(folder: Path, step: int, meta: Mapping[str, Any], keep: int) -> None:
    """Give the working folder of ``step`` its name, once all of it is on disk; keep only the ``keep`` newest.

    A step that is already published is left as it is.
    """
    working, target = working_folder(folder, step), folder / f"step_{step}"
    if read(target) is None:
        _write_meta(working, {"step": step, **meta})
        shutil.rmtree(target, ignore_errors=True)  # what is left there is damaged
        working.rename(target)
        flush(folder)
    _prune(folder, keep)


def _write_meta(working: Path, meta: Mapping[str, Any]) -> None:
    files = sorted(path for path in working.iterdir() if path.is_file())
    for path in files:
        flush(path)
    sizes = {path.name: path.stat().st_size for path in files}
    (working / META).write_text(json.dumps({**meta, FILES: sizes}, indent=2))
    flush(working / META)
    flush(working)


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest, and what interrupted saves have left."""
    for checkpoint in complete(folder)[:-keep]:
        checkpoint.path.rename(folder / f"{_UNFINISHED}old_{checkpoint.path.name}")
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
