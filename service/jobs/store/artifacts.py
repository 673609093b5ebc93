"""Keeps what a job published: a manifest in Redis, the bytes in the job's folder.

A file is reached through the manifest only, and never through a symbolic link or outside the folder. What the manifest
says of it is true at every moment: its bytes are those with the hash, although its job may be writing it anew.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from service.jobs.checkpoints import Checkpoint, complete
from service.jobs.layout import DataLayout, JobPaths
from service.jobs.records import Artifact, NotFound
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import JOB_ARTIFACTS

FOLDER = "inode/directory"
"""Media type of folders (checkpoints, exported models): they have a size, but no hash."""
_LONGEST_NAME = 512
_TRIES = 3
"""An entry may be replaced, and its content deleted, between the look at the manifest and that at the file."""


def checked_name(name: str) -> str:
    """Return the name if it is a plain relative path such as ``plots/loss.png``; raise :class:`ValueError`
    otherwise.
    """
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and name.isprintable() and "\\" not in name
    if not plain or len(name) > _LONGEST_NAME:
        raise ValueError(f"artifact name {name!r}: a relative path without '..', backslashes or control characters")
    return name


@dataclass(frozen=True)
class ArtifactStore:
    """Artifacts by job id and name."""

    client: BrokerClient
    data: DataLayout

    def list(self, job_id: str) -> list[Artifact]:
        """Return all of a job's artifacts, by name."""
        entries = self.client.call("HGETALL", JOB_ARTIFACTS(job_id))
        return [Artifact.model_validate_json(entries[name]) for name in sorted(entries)]

    def left(self, job_id: str) -> tuple[Artifact, ...]:
        """Return the complete checkpoints of a job that ended before it published any: it writes to them no more."""
        return tuple(_described(saved) for saved in complete(self.data.job(job_id).checkpoints))

    def get_left(self, job_id: str, name: str) -> tuple[Artifact, Path]:
        """Return a checkpoint of :meth:`left` and its folder. Raises :class:`NotFound`."""
        for saved in complete(self.data.job(job_id).checkpoints):
            if (found := _described(saved)).name == name:
                return found, saved.path
        raise NotFound(f"job {job_id} has no artifact {name!r}")

    def get(self, job_id: str, name: str) -> tuple[Artifact, Path]:
        """Return an artifact and its file, or its folder where the media type is :data:`FOLDER`. Folders may also lie
        beside the artifacts, as checkpoints do. Raises :class:`NotFound`, also for names that lead elsewhere.
        """
        paths = self.data.job(job_id)
        for _ in range(_TRIES):
            text = self.client.call("HGET", JOB_ARTIFACTS(job_id), name)
            if text is None:
                raise NotFound(f"job {job_id} has no artifact {name!r}")
            artifact = Artifact.model_validate_json(text)
            if (path := _content(paths, artifact)) is not None:
                return artifact, path
        raise NotFound(f"job {job_id} has no artifact {name!r} any more")


def _described(saved: Checkpoint) -> Artifact:
    """Return what the manifest would say of a checkpoint's folder."""
    files = [each.stat() for each in saved.path.iterdir() if each.is_file()]
    made = max((each.st_mtime for each in files), default=0.0)
    return Artifact(
        name=f"{saved.path.parent.name}/{saved.path.name}",
        bytes=sum(each.st_size for each in files),
        sha256="",
        media_type=FOLDER,
        created_at=datetime.fromtimestamp(made, UTC),
    )


def _content(paths: JobPaths, artifact: Artifact) -> Path | None:
    """Return where the bytes are. A file that was entered without a copy of its own is where its job wrote it."""
    if artifact.media_type == FOLDER:
        folders = (_below(home, artifact.name, stat.S_ISDIR) for home in (paths.artifacts, paths.root))
        return next(filter(None, folders), None)
    own = _below(paths.published, artifact.sha256, stat.S_ISREG) if artifact.sha256 else None
    return own or _below(paths.artifacts, artifact.name, stat.S_ISREG)


def _below(folder: Path, name: str, wanted: Callable[[int], bool]) -> Path | None:
    """Return the path, when every step from the folder to it is a real directory and its own mode is the wanted one."""
    try:
        path = folder
        for part in PurePosixPath(checked_name(name)).parts:
            if not stat.S_ISDIR(path.lstat().st_mode):
                return None
            path = path / part
        return path if wanted(path.lstat().st_mode) else None
    except (ValueError, OSError):
        return None
