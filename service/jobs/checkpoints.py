"""Checkpoints of training jobs as they lie on disk: which are complete, and of which steps there are weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.jobs.layout import JobPaths
from service.jobs.safe_files import Folder

META = "meta.json"
FILES = "files"
DESCRIPTION = "model.json"
WEIGHTS = "model.safetensors"
_LARGEST_META = 64 << 20
_PUBLISHED = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    meta: Mapping[str, Any]


def complete(folder: Path) -> list[Checkpoint]:
    """Return complete checkpoints under ``folder``, oldest first; half-written and foreign entries, and links, are
    ignored.
    """
    try:
        with Folder.open(folder) as held:
            found = [_read(held, name) for name in held.names()]
    except OSError:
        return []
    return sorted((checkpoint for checkpoint in found if checkpoint is not None), key=lambda found: found.step)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint under ``folder``."""
    return next(reversed(complete(folder)), None)


def read(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or None unless every file that it lists is there in full."""
    try:
        with Folder.open(path.parent) as held:
            return _read(held, path.name)
    except OSError:
        return None


def _read(above: Folder, name: str) -> Checkpoint | None:
    matched = _PUBLISHED.fullmatch(name)
    if matched is None:
        return None
    try:
        with above.folder(name) as folder:
            meta = json.loads(folder.read(META, _LARGEST_META))
            sizes = {entry.name: entry.status.st_size for entry in folder.files()}
        intact = all(sizes.get(file) == size for file, size in meta[FILES].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(int(matched[1]), above.path / name, meta) if intact else None


def require(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``; raises ``ValueError`` unless it is complete."""
    checkpoint = read(path)
    if checkpoint is None:
        raise ValueError(f"{path} is not a complete checkpoint: {META} or a file that it lists is missing or cut short")
    return checkpoint


def finished(artifacts: Path) -> dict[str, Any] | None:
    """Return the description of the model that a job has finished; ``None`` where it has not."""
    try:
        with Folder.open(artifacts) as folder:
            folder.reader(WEIGHTS).close()
            description: dict[str, Any] = json.loads(folder.read(DESCRIPTION, _LARGEST_META))
    except OSError:
        return None
    return description


def steps_of_checkpoints(paths: JobPaths) -> tuple[int, ...]:
    """Return the steps of a job's complete checkpoints, in order: what another job can resume."""
    return tuple(each.step for each in complete(paths.checkpoints))


def steps_of_weights(paths: JobPaths) -> tuple[int, ...]:
    """Return the steps of which a job has left weights, in order: those of checkpoints and of the finished model."""
    try:
        model = finished(paths.artifacts)
    except (OSError, ValueError):
        model = None
    return tuple(sorted({*steps_of_checkpoints(paths), *([model["step"]] if model else [])}))
