"""Keeps what a job published: a manifest in Redis, the bytes in the job's folder.

A file is reached through the manifest only, never through a symbolic link or outside the folder, and what is checked is
what is open: a job may lay something else in its place meanwhile. What the manifest
says of it is true at every moment: its bytes are those with the hash, although its job may be writing it anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import BinaryIO, TypeVar

from service.jobs.checkpoints import Checkpoint, complete
from service.jobs.events import LATEST
from service.jobs.layout import DataLayout, JobPaths
from service.jobs.records import Artifact, NotFound
from service.jobs.safe_files import Folder
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import JOB_ARTIFACTS

_Opened = TypeVar("_Opened")
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

    def open_left(self, job_id: str, name: str) -> tuple[Artifact, Folder]:
        """Return a checkpoint of :meth:`left` and its folder, open. Raises :class:`NotFound`."""
        for artifact in self.left(job_id):
            if artifact.name == name:
                with Folder.open(self.data.job(job_id).root) as root:
                    return artifact, root.folder(name)
        raise NotFound(f"job {job_id} has no artifact {name!r}")

    def open(self, job_id: str, name: str) -> tuple[Artifact, BinaryIO | Folder]:
        """Return an artifact and its file, open, or its folder where the media type is :data:`FOLDER`. Folders may also
        lie beside the artifacts, as checkpoints do. Raises :class:`NotFound`, also for names that lead elsewhere.
        """
        paths = self.data.job(job_id)
        for _ in range(_TRIES):
            text = self.client.call("HGET", JOB_ARTIFACTS(job_id), name)
            if text is None:
                raise NotFound(f"job {job_id} has no artifact {name!r}")
            artifact = Artifact.model_validate_json(text)
            if (content := _content(paths, artifact)) is not None:
                return artifact, content
        raise NotFound(f"job {job_id} has no artifact {name!r} any more")

    def read(self, job_id: str, name: str, most: int) -> bytes:
        """Return the content of an artifact that is a file of at most ``most`` bytes; raises :class:`NotFound` for any
        other.
        """
        _, found = self.open(job_id, name)
        with found:
            content = b"" if isinstance(found, Folder) else found.read(most + 1)
        if isinstance(found, Folder) or len(content) > most:
            raise NotFound(f"artifact {name!r} of job {job_id} is no file of at most {most} bytes")
        return content


def _described(saved: Checkpoint) -> Artifact:
    """Return what the manifest would say of a checkpoint's folder."""
    with Folder.open(saved.path.parent) as above, above.folder(saved.path.name) as folder:
        files = [entry.status for entry in folder.files()]
    made = max((each.st_mtime for each in files), default=0.0)
    return Artifact(
        name=f"{saved.path.parent.name}/{saved.path.name}",
        bytes=sum(each.st_size for each in files),
        sha256="",
        media_type=FOLDER,
        created_at=datetime.fromtimestamp(min(max(made, 0.0), LATEST), UTC),  # a job sets times as it likes
    )


def _content(paths: JobPaths, artifact: Artifact) -> BinaryIO | Folder | None:
    """Open where the bytes are. A file that was entered without a copy of its own is where its job wrote it."""
    try:
        name = checked_name(artifact.name)
        with Folder.open(paths.root) as root:
            if artifact.media_type == FOLDER:
                return _first(root.folder, f"artifacts/{name}", name)
            kept = [f"published/{checked_name(artifact.sha256)}"] if artifact.sha256 else []
            return _first(root.reader, *kept, f"artifacts/{name}")
    except (ValueError, OSError):
        return None


def _first(opened: Callable[[str], _Opened], *places: str) -> _Opened | None:
    """Return what can be opened first."""
    for place in places:
        with contextlib.suppress(OSError):
            return opened(place)
    return None
