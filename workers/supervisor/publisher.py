"""Enters the files that a job produced into its manifest, with content that no longer changes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from service.jobs.events import ArtifactEvent, Event
from service.jobs.layout import JobPaths
from service.jobs.records import Artifact, AttemptRef, Superseded
from service.jobs.store import Attempts, StoreUnavailable
from service.jobs.store.artifacts import FOLDER
from workers import event_protocol
from workers.supervisor.broker_retry import retry_until
from workers.supervisor.settings import SupervisorSettings


class UnusableArtifact(Exception):  # noqa: N818
    """Something was announced as an artifact and is none; the message says why."""


def publish(
    paths: JobPaths, name: str, media_type: str, copied_bytes: int = SupervisorSettings.copied_bytes
) -> Artifact:
    """Take the content of an announced artifact as it is now into ``paths.published``, under its hash; of a folder only
    the size. Raises :class:`UnusableArtifact` when it is missing or outside the job's folder.
    """
    path = _locate(paths, name)
    now = datetime.now(UTC)
    if path.is_dir():
        size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        return Artifact(name=name, bytes=size, sha256="", media_type=FOLDER, created_at=now)
    paths.published.mkdir(exist_ok=True)
    draft = paths.published / f".{uuid.uuid4().hex}"
    try:
        _keep(path, draft, copied_bytes)
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        draft.replace(paths.published / digest)
    finally:
        draft.unlink(missing_ok=True)
    return Artifact(name=name, bytes=size, sha256=digest, media_type=media_type, created_at=now)


def _keep(path: Path, draft: Path, copied_bytes: int) -> None:
    """Give a large file, which jobs replace and never write to again, another name; copy a small one, to be sure."""
    if path.stat().st_size > copied_bytes:
        with contextlib.suppress(OSError):  # another file system, or another owner
            os.link(path, draft)
            return
    shutil.copyfile(path, draft)


def clear_unpublished(paths: JobPaths, manifest: Iterable[Artifact]) -> None:
    """Delete contents that no entry of the manifest is about any more, while nothing is being published."""
    known = {artifact.sha256 for artifact in manifest}
    if paths.published.is_dir():
        for path in paths.published.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)


def _locate(paths: JobPaths, name: str) -> Path:
    for home in (paths.artifacts, paths.root):
        path = (home / name).resolve()
        if not path.is_relative_to(home.resolve()) or path == home.resolve():
            raise UnusableArtifact(f"artifact {name!r} lies outside the job's folder")
        if path.is_file() or path.is_dir():
            return path
    raise UnusableArtifact(f"artifact {name!r} was announced, but there is no such file")


class Publisher:
    """Hashes and records artifacts one after the other, beside everything else that goes on."""

    def __init__(
        self,
        attempts: Attempts,
        ref: AttemptRef,
        paths: JobPaths,
        say: Callable[[Event], None],
        record: Callable[[Event], None],
        *,
        settings: SupervisorSettings,
    ) -> None:
        self._attempts, self._ref, self._paths, self._say, self._record = attempts, ref, paths, say, record
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def publish(self, event: ArtifactEvent) -> None:
        task = asyncio.get_running_loop().create_task(self._publish(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait for all that was announced."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _publish(self, event: ArtifactEvent) -> None:
        async with self._turn:
            try:
                artifact = await asyncio.to_thread(
                    publish, self._paths, event["name"], event["media_type"], self._settings.copied_bytes
                )
                await retry_until(self._settings.report_within_s, self._attempts.record_artifact, self._ref, artifact)
            except (UnusableArtifact, ValueError, OSError) as error:
                self._say(event_protocol.log_event(str(error), rank=event["rank"]))
            except (Superseded, StoreUnavailable):
                pass  # the attempt is not ours any more; its lease tells the supervisor
            else:
                described = {**event, "bytes": artifact.bytes, "sha256": artifact.sha256}
                self._record(cast(Event, described))
