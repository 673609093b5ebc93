"""Checkpoint folders on disk: publishing, keeping the newest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.jobs.atomic import flush
from service.jobs.checkpoints import FILES, META, complete, read

_UNFINISHED = ".unfinished_"


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
