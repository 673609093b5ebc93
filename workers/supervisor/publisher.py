"""Publishes the files of a job: enters them into its manifest, with content that no longer changes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import BinaryIO, cast

from service.jobs.events import ArtifactEvent, Event
from service.jobs.files import Folder, JobPaths, UnsafePathError
from service.jobs.records import Artifact, AttemptRef, Conflict, Superseded
from service.jobs.store import Attempts, StoreUnavailable
from service.jobs.store.artifacts import FOLDER
from workers import event_protocol
from workers.supervisor.lease import retry_until
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.uploader import Uploader

_CHUNK = 1 << 20
_MOST_WAITING = 20_000
"""The most announced artifacts that wait for their turn; more than any job may have are not taken."""
_TOO_LATE = "it was not read to its end: the attempt ended before"


class UnusableArtifact(Exception):  # noqa: N818
    """An announced artifact is unusable; the message says why."""


def publish(
    paths: JobPaths,
    name: str,
    media_type: str,
    copied_bytes: int = SupervisorSettings.copied_bytes,
    is_over: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Take the content of an announced artifact as it is now into ``paths.published``, under its hash; for a
    folder, only take its size. Raises :class:`UnusableArtifact` if it is missing, outside the job's folder,
    neither file nor folder, or written to meanwhile, and once ``is_over`` says that there is no time left.
    """
    with Folder.open(paths.root) as root, _locate(root, name) as found:
        if isinstance(found, Folder):
            size, digest, media_type = _measure_folder(found, is_over), "", FOLDER
        else:
            with root.make(paths.published.name) as published:
                size, digest = _keep(found, published, copied_bytes, is_over)
    return Artifact(name=name, bytes=size, sha256=digest, media_type=media_type, created_at=datetime.now(UTC))


def _publish_text(paths: JobPaths, name: str, text: str) -> Artifact:
    """Publish the service's own text, which no rank has touched."""
    content = text.encode()
    digest = hashlib.sha256(content).hexdigest()
    with Folder.open(paths.root) as root, root.make(paths.published.name) as published:
        published.write(digest, content)
    return Artifact(name=name, bytes=len(content), sha256=digest, media_type="text/plain", created_at=datetime.now(UTC))


def _keep(file: BinaryIO, published: Folder, copied_bytes: int, is_over: Callable[[], bool]) -> tuple[int, str]:
    """Link a large file, which jobs replace and never write to again, under another name. Copy a small one, since jobs
    may write to it, and one that cannot be linked. Return size and SHA-256 of the published file.
    """
    draft = f".{uuid.uuid4().hex}"
    is_small = os.fstat(file.fileno()).st_size <= copied_bytes
    try:
        if is_small or not _link_draft(file, published, draft):
            with published.create(draft) as copy:
                copy.writelines([file.read(copied_bytes)] if is_small else _read_unchanged(file, is_over))
        with published.reader(draft) as kept:
            size, digest = _hash_file(kept, is_over)
        published.rename(draft, digest)
    finally:
        published.unlink(draft)
    return size, digest


def _link_draft(file: BinaryIO, published: Folder, draft: str) -> bool:
    """Return whether the file has one more name now; not on every file system, and not if it is another user's."""
    with contextlib.suppress(OSError):
        published.link(file, draft)
        return True
    return False


def _measure_folder(folder: Folder, is_over: Callable[[], bool]) -> int:
    size = 0
    for each in folder.files():
        if is_over():
            raise UnusableArtifact(_TOO_LATE)
        size += each.status.st_size
    return size


def _hash_file(file: BinaryIO, is_over: Callable[[], bool]) -> tuple[int, str]:
    """Return size and SHA-256 of a file that is no longer written to."""
    size, digest = 0, hashlib.sha256()
    for chunk in _read_unchanged(file, is_over):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()


def _read_unchanged(file: BinaryIO, is_over: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the content of a file. Raises :class:`UnusableArtifact` if its size changes meanwhile."""
    size = os.fstat(file.fileno()).st_size
    while chunk := file.read(_CHUNK):
        if is_over():
            raise UnusableArtifact(_TOO_LATE)
        if file.tell() > size:
            break
        yield chunk
    if file.tell() != size:
        raise UnusableArtifact("it was written to while it was published")


def clear_unpublished(paths: JobPaths, manifest: Iterable[Artifact]) -> None:
    """Delete contents that no entry of the manifest names any more, while nothing is being published."""
    known = {artifact.sha256 for artifact in manifest}
    with contextlib.suppress(FileNotFoundError), Folder.open(paths.published) as published:
        for name in published.names():
            if name not in known:
                published.remove(name)


def _locate(root: Folder, name: str) -> BinaryIO | Folder:
    """Locate an announced file, below the artifacts or the job's folder."""
    if not PurePosixPath(name).parts:
        raise UnusableArtifact("it is the folder of all artifacts")
    for place in (f"artifacts/{name}", name):
        try:
            return root.folder(place) if _is_folder(root, place) else root.reader(place)
        except FileNotFoundError:
            continue
        except UnsafePathError as error:
            raise UnusableArtifact(f"it is outside the job's folder, or is not a file: {error}") from error
    raise UnusableArtifact("it was announced, but there is no such file")


def _is_folder(root: Folder, name: str) -> bool:
    handle = root.handle(name)
    try:
        return stat.S_ISDIR(os.fstat(handle).st_mode)
    finally:
        os.close(handle)


class Publisher:
    """Hashes and records artifacts one after the other, in the background."""

    def __init__(
        self,
        attempts: Attempts,
        ref: AttemptRef,
        paths: JobPaths,
        uploader: Uploader,
        *,
        settings: SupervisorSettings,
        store: Callable[[Artifact], None],
    ) -> None:
        self._store = store
        self._attempts, self._ref, self._paths, self._uploader = attempts, ref, paths, uploader
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._is_over = threading.Event()
        self.beyond_limits = 0
        """Number of artifacts beyond the job's limits; their content stays in ``published``."""

    def give_up(self) -> None:
        """Publish nothing more."""
        self._is_over.set()

    def publish(self, event: ArtifactEvent) -> None:
        """Publish an artifact that a rank announced, in its turn."""
        copied, is_over = self._settings.copied_bytes, self._is_over.is_set
        taken = functools.partial(publish, self._paths, event["name"], event["media_type"], copied, is_over)
        self._begin(event, taken)

    def publish_text(self, rank: int, name: str, text: str) -> None:
        """Publish a text of the service about a rank, in its turn."""
        event = ArtifactEvent(type="artifact", time=time.time(), rank=rank, name=name, media_type="text/plain")
        self._begin(event, functools.partial(_publish_text, self._paths, name, text))

    def _begin(self, event: ArtifactEvent, taken: Callable[[], Artifact]) -> None:
        if len(self._tasks) >= _MOST_WAITING:
            self.beyond_limits += 1
            return
        task = asyncio.get_running_loop().create_task(self._publish(event, taken))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait for all announced artifacts, and report how many were beyond the limits."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.beyond_limits > 1:
            said = (
                f"{self.beyond_limits} artifacts were not taken, because the job has as many or as large ones as it may"
            )
            self._uploader.put(event_protocol.log_event(said))

    async def _publish(self, event: ArtifactEvent, taken: Callable[[], Artifact]) -> None:
        async with self._turn:
            try:
                artifact = await asyncio.to_thread(taken)
                await asyncio.to_thread(self._store, artifact)
                await retry_until(self._settings.report_within_s, self._attempts.record_artifact, self._ref, artifact)
            except Conflict as refusal:
                self.beyond_limits += 1
                if self.beyond_limits == 1:
                    said = f"artifact {event['name']!r} was not taken: {refusal}"
                    self._uploader.put(event_protocol.log_event(said, rank=event["rank"]))
            except (UnusableArtifact, ValueError, OSError) as error:
                self._uploader.put(event_protocol.log_event(f"artifact {event['name']!r}: {error}", rank=event["rank"]))
            except (Superseded, StoreUnavailable):
                pass  # another attempt has taken over; the supervisor learns it from its lease
            else:
                described = {**event, "bytes": artifact.bytes, "sha256": artifact.sha256}
                self._uploader.record(cast(Event, described))
