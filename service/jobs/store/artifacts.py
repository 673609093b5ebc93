"""Keeps the artifacts of jobs: a manifest in Redis, the bytes in the job's folder.

A file is reached through the manifest only, never through a symbolic link or outside the folder, and the open file
itself is checked: a job may replace it meanwhile. The manifest's entry is true at every moment: its bytes have its
hash, even while its job writes the file anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import BinaryIO, TypeVar

from service.jobs.events import LATEST, attempt_folders
from service.jobs.files import (
    DESCRIPTION,
    WEIGHTS,
    Checkpoint,
    DataLayout,
    Folder,
    JobPaths,
    complete,
    described,
    remove_tree,
    steps_of_checkpoints,
    steps_of_weights,
)
from service.jobs.files.objects import (
    PUBLISHED,
    ObjectStore,
    RemoteFile,
    RemoteFolder,
    folder_tree,
    job_files,
    newest_state,
    record_tree,
    step_of,
)
from service.jobs.records import Artifact, NotFound
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import JOB_ARTIFACTS

_Opened = TypeVar("_Opened")
FOLDER = "inode/directory"
"""Media type of folders (checkpoints, exported models): they have a size, but no hash."""
_LONGEST_NAME = 512
_LARGEST_DESCRIPTION = 16 << 20
_TRIES = 3
"""Tries: an entry may be replaced, and its content deleted, after the manifest is read and before the file is opened.
"""


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
    objects: ObjectStore | None = None
    """The store of the files if hosts share no folder."""

    def list(self, job_id: str) -> list[Artifact]:
        """Return all of a job's artifacts, by name."""
        entries = self.client.call("HGETALL", JOB_ARTIFACTS(job_id))
        return [Artifact.model_validate_json(entries[name]) for name in sorted(entries)]

    def left(self, job_id: str) -> tuple[Artifact, ...]:
        """Return the complete checkpoints of a job that has not published them: its attempt still runs, or
        ended before it could. One that is deleted meanwhile is left out.
        """
        if self.objects is not None:
            return tuple(_entry_of_folder(folder) for folder in self._checkpoints(self.objects, job_id).values())
        found = []
        for saved in complete(self.data.job(job_id).checkpoints):
            with contextlib.suppress(OSError):
                found.append(_described(saved))
        return tuple(found)

    def open_left(self, job_id: str, name: str) -> tuple[Artifact, Folder | RemoteFolder]:
        """Return a checkpoint of :meth:`left` and its folder, open. Raises :class:`NotFound`."""
        if self.objects is not None:
            if (folder := self._checkpoints(self.objects, job_id).get(name)) is None:
                raise NotFound(f"job {job_id} has no artifact {name!r}")
            return _entry_of_folder(folder), folder
        for artifact in self.left(job_id):
            if artifact.name == name:
                with contextlib.suppress(OSError), Folder.open(self.data.job(job_id).root) as root:
                    return artifact, root.folder(name)
        raise NotFound(f"job {job_id} has no artifact {name!r}")

    def open(self, job_id: str, name: str) -> tuple[Artifact, BinaryIO | Folder | RemoteFile | RemoteFolder]:
        """Return an artifact and its file, open, or its folder if the media type is :data:`FOLDER`. Folders may
        also lie beside the artifacts, as checkpoints do. Raises :class:`NotFound`, also for names that lead
        elsewhere.
        """
        paths = self.data.job(job_id)
        for _ in range(_TRIES):
            text = self.client.call("HGET", JOB_ARTIFACTS(job_id), name)
            if text is None:
                raise NotFound(f"job {job_id} has no artifact {name!r}")
            artifact = Artifact.model_validate_json(text)
            if self.objects is not None and (remote := self._remote(self.objects, job_id, artifact)) is not None:
                return artifact, remote
            if self.objects is None and (content := _content(paths, artifact)) is not None:
                return artifact, content
        raise NotFound(f"job {job_id} has no artifact {name!r} any more")

    def read(self, job_id: str, name: str, most: int) -> bytes:
        """Return the content of an artifact that is a file of at most ``most`` bytes; raises :class:`NotFound` for any
        other.
        """
        artifact, found = self.open(job_id, name)
        content = b""
        if isinstance(found, RemoteFile) and artifact.bytes <= most:
            content = b"".join(found.chunks())
        elif not isinstance(found, RemoteFile | RemoteFolder):
            with found:
                content = b"" if isinstance(found, Folder) else found.read(most + 1)
        if artifact.media_type == FOLDER or max(len(content), artifact.bytes) > most:
            raise NotFound(f"artifact {name!r} of job {job_id} is no file of at most {most} bytes")
        return content

    def steps_of_checkpoints(self, job_id: str) -> tuple[int, ...]:
        """Return the steps of a job's complete checkpoints, in order: another job can resume these."""
        if self.objects is None:
            return steps_of_checkpoints(self.data.job(job_id))
        return tuple(sorted(_step(name) for name in self._checkpoints(self.objects, job_id)))

    def steps_of_weights(self, job_id: str) -> tuple[int, ...]:
        """Return the steps at which a job has left weights, in order."""
        if self.objects is None:
            return steps_of_weights(self.data.job(job_id))
        model = []
        with contextlib.suppress(NotFound, ValueError):
            self.open(job_id, WEIGHTS)
            model.append(described(self.read(job_id, DESCRIPTION, _LARGEST_DESCRIPTION))["step"])
        return tuple(sorted({*self.steps_of_checkpoints(job_id), *model}))

    def left_steps(self, job_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the steps at which a job has left weights, and those of its checkpoints."""
        return self.steps_of_weights(job_id), self.steps_of_checkpoints(job_id)

    def fetch_records(self, job_id: str) -> None:
        """Fetch the reports and logs of ended attempts' ranks on other hosts; they stay here."""
        if self.objects is None:
            return
        owner, attempts = job_files(job_id), self.data.job(job_id).attempts
        for number in set(self.objects.numbers(f"{owner}/records")) - attempt_folders(attempts).keys():
            if (manifest := self.objects.manifest(owner, record_tree(number))) is not None:
                attempts.mkdir(parents=True, exist_ok=True)
                with Folder.open(attempts) as folder, folder.make(f".{number}") as draft:
                    for name, file in self.objects.tree(owner, manifest).files.items():
                        self.objects.fetch(file, draft, name)
                    with contextlib.suppress(OSError):  # another process was faster
                        folder.rename(f".{number}", str(number))

    def remove(self, job_id: str) -> None:
        """Delete all files of a job."""
        remove_tree(self.data.job(job_id).root)
        if self.objects is not None:
            self.objects.remove(job_files(job_id))

    def _checkpoints(self, objects: ObjectStore, job_id: str) -> dict[str, RemoteFolder]:
        """Return the checkpoints that a job has left in the object store, by their names as artifacts."""
        if (found := newest_state(objects, job_id)) is None:
            return {}
        names = {"/".join(name.split("/")[:2]) for name in found[1].files if step_of(name) is not None}
        return {name: objects.tree(job_files(job_id), found[1], f"{name}/") for name in names}

    def _remote(self, objects: ObjectStore, job_id: str, artifact: Artifact) -> RemoteFile | RemoteFolder | None:
        owner = job_files(job_id)
        if artifact.media_type != FOLDER:
            return RemoteFile(objects, f"{owner}/{PUBLISHED}/{artifact.sha256}", artifact.sha256, artifact.bytes)
        if step_of(f"{artifact.name}/") is not None:
            return self._checkpoints(objects, job_id).get(artifact.name)
        manifest = objects.manifest(owner, folder_tree(artifact.name))
        return None if manifest is None else replace(objects.tree(owner, manifest), name=artifact.name)


def _step(name: str) -> int:
    return step_of(f"{name}/") or 0


def _entry_of_folder(folder: RemoteFolder) -> Artifact:
    """Return the manifest's entry for a checkpoint in the object store."""
    name = f"checkpoints/{folder.name}"
    return Artifact(name=name, bytes=folder.bytes, sha256="", media_type=FOLDER, created_at=datetime.now(UTC))


def _described(saved: Checkpoint) -> Artifact:
    """Return the manifest's entry for a checkpoint's folder."""
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
    """Open the file that holds the bytes. One that was entered without a copy is still where its job wrote it."""
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
    """Return the first file that can be opened."""
    for place in places:
        with contextlib.suppress(OSError):
            return opened(place)
    return None
