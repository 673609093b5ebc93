"""Reads the checkpoints of training jobs on disk: the complete ones, and the steps that have weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.jobs.files.layout import JobPaths
from service.jobs.files.safe_files import Folder

META = "meta.json"
FILES, DIGESTS = "files", "sha256"
"""Fields of a description: the sizes of the files in bytes, and the SHA-256 of their contents, by name."""
_SIGNED = "digest"
"""The SHA-256 of the description's other fields."""
DESCRIPTION = "model.json"
WEIGHTS = "model.safetensors"
_LARGEST_META = 16 << 20
_MOST_META = 64 << 20
"""The most bytes of descriptions read from one folder, newest first: a job may leave any number of them."""
_PUBLISHED = re.compile(r"step_(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    meta: Mapping[str, Any]


def complete(folder: Path) -> list[Checkpoint]:
    """Return complete checkpoints under ``folder``, oldest first; only the newest of very many. Half-written
    and foreign entries, and links, are ignored.
    """
    try:
        with Folder.open(folder) as held:
            return list(_newest(held))[::-1]
    except OSError:
        return []


def incomplete(folder: Path, after: int) -> list[int]:
    """Return the steps later than ``after`` whose checkpoints were published under ``folder`` and are not whole now."""
    try:
        with Folder.open(folder) as held:
            steps = {int(matched[1]) for name in held.names() if (matched := _PUBLISHED.fullmatch(name))}
    except OSError:
        return []
    return sorted(step for step in steps - {each.step for each in complete(folder)} if step > after)


def _newest(held: Folder) -> Iterator[Checkpoint]:
    steps = {name: int(matched[1]) for name in held.names() if (matched := _PUBLISHED.fullmatch(name))}
    left = _MOST_META
    for name in sorted(steps, key=lambda name: (steps[name], name), reverse=True):
        found, size = _read(held, name)
        left -= size
        if left < 0:
            return
        if found is not None:
            yield found


def read(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or None unless every file that it lists is there in full."""
    try:
        with Folder.open(path.parent) as held:
            return _read(held, path.name)[0]
    except OSError:
        return None


def _read(above: Folder, name: str) -> tuple[Checkpoint | None, int]:
    """Return a checkpoint, if it is one, and how many bytes reading it took."""
    matched, text = _PUBLISHED.fullmatch(name), b""
    if matched is None:
        return None, 0
    try:
        with above.folder(name) as folder:
            text = folder.read(META, _LARGEST_META)
            meta = _parsed(text)
            sizes = {entry.name: entry.status.st_size for entry in folder.files()}
        intact = all(sizes.get(file) == size for file, size in meta[FILES].items()) and meta in (
            signed(meta),
            _bare(meta),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, len(text)
    return Checkpoint(int(matched[1]), above.path / name, meta) if intact else None, len(text)


def signed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's description with a digest of itself."""
    bare = _bare(meta)
    return {**bare, _SIGNED: hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()}


def _bare(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in meta.items() if name != _SIGNED}


def _parsed(text: bytes) -> Any:
    """Return the contents of a JSON file of a rank, whose integers may have any length. Raises ``ValueError``."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def require(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``; raises ``ValueError`` unless it is complete."""
    checkpoint = read(path)
    if checkpoint is None:
        raise ValueError(f"{path} is not a complete checkpoint: {META} or a file that it lists is missing or cut short")
    return checkpoint


def finished(artifacts: Path) -> dict[str, Any] | None:
    """Return the description of a job's finished model; ``None`` if there is none. Raises ``ValueError``."""
    try:
        with Folder.open(artifacts) as folder:
            folder.reader(WEIGHTS).close()
            return described(folder.read(DESCRIPTION, _LARGEST_META))
    except OSError:
        return None


def described(text: bytes) -> dict[str, Any]:
    """Return the description of a finished model, which has its ``step``. Raises ``ValueError``."""
    description: Any = _parsed(text)
    match description:
        case {"step": int(step)} if type(step) is int and step >= 0:
            return dict(description)
    raise ValueError(f"{DESCRIPTION} is not the description of a model: it names no step")


def steps_of_checkpoints(paths: JobPaths) -> tuple[int, ...]:
    """Return the steps of a job's complete checkpoints, in order: those that another job can resume."""
    return tuple(each.step for each in complete(paths.checkpoints))


def steps_of_weights(paths: JobPaths) -> tuple[int, ...]:
    """Return the steps at which a job has left weights, in order: those of checkpoints and of the finished model."""
    try:
        model = finished(paths.artifacts)
    except (OSError, ValueError):
        model = None
    return tuple(sorted({*steps_of_checkpoints(paths), *([model["step"]] if model else [])}))
