"""Defines where every file lives under the data directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PLAIN = re.compile(r"\w[\w-]*", re.ASCII)


@dataclass(frozen=True)
class Below:
    """A file or folder of this name in the ``root`` of what it is an attribute of."""

    name: str

    def __get__(self, layout: JobPaths | DataLayout, _: type) -> Path:
        return layout.root / self.name


@dataclass(frozen=True)
class JobPaths:
    """Folders of one job. Attempts share artifacts and checkpoints; each has a folder with its record, and in that one
    a work folder. Ranks may write in the artifacts, the checkpoints and the work folder only.
    """

    root: Path

    artifacts = Below("artifacts")
    checkpoints = Below("checkpoints")
    published = Below("published")
    """The folder of published files by SHA-256, which nothing writes to any more: names are in the manifest."""
    attempts = Below("attempts")

    def attempt(self, number: int) -> Path:
        return self.attempts / str(number)

    def work(self, number: int) -> Path:
        """Return the folder in which the ranks of an attempt run, and leave its result."""
        return self.attempt(number) / "work"


@dataclass(frozen=True)
class DataLayout:
    """Names the files of the data directory that API and workers share."""

    root: Path

    broker = Below("broker")
    """State of the embedded broker: append-only file, socket, log."""
    admin_key = Below("admin.key")
    """The file of the first admin key, readable by the service's user only."""
    api_socket = Below("api.sock")
    """The socket of the API for this user's own commands: the folder's owner proves who listens."""
    api_address = Below("api.url")
    """The file with the URL of the API that has the socket."""
    files = Below("files")
    """Uploaded files by content hash."""
    hosts = Below("hosts")
    """A folder for each host's worker."""
    uploads_lock = Below("uploads.lock")
    """The file that is locked while the content of an upload is added or removed."""
    tensorboard = Below("tensorboard")
    """The folder of event files for TensorBoard, with a folder for each job that is exported there."""
    wandb = Below("wandb")
    """The folder of offline runs for Weights & Biases, with a folder for each job that is exported there."""
    audit = Below("audit")
    """The folder of the older part of the audit log."""
    cache = Below("cache")
    """The folder of files that ranks derived from uploads (tokens of a text, the parts of an archive, the
    weights of an ONNX model). It may be deleted whenever no job is starting, and is made again when needed.
    On hosts with user namespaces, ranks see their owner's part in its place. Workers keep all of it
    within ``max_cache_bytes``.
    """

    def file(self, file_id: str) -> Path:
        """Return the path of an uploaded file's content; its id ends with the content's SHA-256."""
        digest = file_id.removeprefix("file_")
        return self.files / digest[:2] / digest

    def host(self, name: str) -> Path:
        """Return the folder of one host's worker: which attempts it supervises, the log of its supervisors."""
        return self.hosts / name

    def launcher(self, name: str) -> Path:
        """Return the folder of a launcher: the messages to its hosts, which are private, and their output."""
        return self.root / "launchers" / name

    def job(self, job_id: str) -> JobPaths:
        """Return the folders of a job. Raises :class:`ValueError` for an id that could lead elsewhere: ids come
        from the broker, where hosts write.
        """
        if _PLAIN.fullmatch(job_id) is None:
            raise ValueError(f"{job_id!r} is no job's id")
        return JobPaths(self.root / "jobs" / job_id)
