"""Passes the files of a job through an object store when hosts share no folder.

Before ranks start, it fetches their files. While they run, it stores the files for the next attempt. It lets no
success be reported before all of its files are stored.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from service.jobs.files import META, DataLayout, Entry, Folder, JobPaths, complete
from service.jobs.files.objects import (
    PUBLISHED,
    ObjectStore,
    RemoteFile,
    StoredObject,
    TreeManifest,
    folder_tree,
    job_files,
    newest_state,
    record_tree,
    state_tree,
    step_of,
)
from service.jobs.records import Artifact, Claim, JobError, PartOutcome
from service.jobs.store import ArtifactStore, Files
from service.jobs.store.artifacts import FOLDER
from workers.supervisor.settings import SupervisorSettings

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0

_Version = tuple[int, int, int]
"""Identifies one version of a file: inode, size and time."""


@dataclass
class Mirror:
    """Serves one attempt; does nothing without an object store. All calls but :meth:`run` block."""

    claim: Claim
    layout: DataLayout
    artifacts: ArtifactStore
    files: Files
    settings: SupervisorSettings
    is_lost: Callable[[], bool]
    """Whether the attempt is no longer this supervisor's."""
    fault: str = ""
    """Why the object store lacks some of the files."""
    _put_before: dict[_Version, StoredObject] = field(default_factory=dict)
    _versions: dict[str, _Version] = field(default_factory=dict)

    @property
    def objects(self) -> ObjectStore | None:
        return self.artifacts.objects

    @property
    def _paths(self) -> JobPaths:
        return self.layout.job(self.claim.ref.job_id)

    @property
    def _owner(self) -> str:
        return job_files(self.claim.ref.job_id)

    def fetch(self) -> None:
        """Fetch the state from which the attempt continues, and the files and jobs that its spec names. Raises
        :class:`OSError`.
        """
        if (objects := self.objects) is None:
            return
        todo: list[Callable[[], None]] = [functools.partial(self._fetch_state, objects)]
        todo += [functools.partial(self.files.fetch, file_id) for file_id in self.claim.files]
        for needed in self.claim.sources:
            step = needed.weights if isinstance(needed.weights, int) else None
            todo.append(functools.partial(self._fetch_job, objects, needed.job_id, step))
        for act in todo:
            self._repeat(act, self.settings.claim_within_s)

    def publish(self, artifact: Artifact) -> None:
        """Store an artifact before its job's manifest names it. Checkpoints belong to the next attempt's files."""
        objects = self.objects
        if objects is None or (artifact.media_type == FOLDER and step_of(f"{artifact.name}/") is not None):
            return

        def put() -> None:
            with Folder.open(self._paths.root) as root:
                if artifact.media_type != FOLDER:
                    with root.reader(f"{PUBLISHED}/{artifact.sha256}") as file:
                        objects.put(self._owner, PUBLISHED, file)
                    return
                with root.folder(f"artifacts/{artifact.name}") as folder:
                    self._put(objects, folder_tree(artifact.name), folder, folder.files())

        self._try(put)

    async def run(self) -> None:
        """Store the next attempt's files whenever the ranks have written some."""
        while self.objects is not None:
            await asyncio.sleep(self.settings.store_interval_s)
            try:
                await asyncio.to_thread(self._put_state, self.objects)
            except FileNotFoundError:
                pass  # the ranks have removed it meanwhile
            except OSError as error:
                logger.warning("the ranks' files are not in the object store yet: %s", error)

    def finish(self) -> None:
        """Store the rest, and the ranks' reports and output."""
        tree, attempt = record_tree(self.claim.ref.attempt), self._paths.attempt(self.claim.ref.attempt)
        if (objects := self.objects) is None or not attempt.exists():
            return

        def put_record() -> None:
            with Folder.open(attempt) as folder:
                self._put(objects, tree, folder, (each for each in folder.files() if "/" not in each.name))

        self._try(functools.partial(self._put_state, objects))
        self._try(put_record)

    def judge(self, outcome: PartOutcome) -> PartOutcome:
        """Return the outcome, which is a success only if the object store has all of its files."""
        if outcome.status != "succeeded" or not self.fault:
            return outcome
        return PartOutcome(status="lost", error=JobError(type="ObjectStoreError", message=self.fault))

    def _put_state(self, objects: ObjectStore) -> None:
        with Folder.open(self._paths.root) as root:
            steps = {each.step for each in complete(self._paths.checkpoints)}
            entries = []
            for place in (self._paths.checkpoints.name, self._paths.artifacts.name):
                with root.folder(place) as folder:
                    entries += [each for each in folder.files(f"{place}/") if _is_kept(each.name, steps)]
            versions = {each.name: _version(each) for each in entries}
            if versions != self._versions:
                is_first = not self._versions
                self._put(objects, state_tree(self.claim.ref.attempt), root, entries)
                self._versions = versions
                if is_first:
                    self._forget_earlier(objects)

    def _forget_earlier(self, objects: ObjectStore) -> None:
        """Delete the state of earlier attempts, now that this attempt's own is stored."""
        for number in objects.numbers(f"{self._owner}/attempts"):
            if number < self.claim.ref.attempt:
                objects.remove(f"{self._owner}/{state_tree(number)}")

    def _put(self, objects: ObjectStore, tree: str, folder: Folder, entries: Iterable[Entry]) -> None:
        files = {}
        for entry in entries:
            known = self._put_before.get(_version(entry))
            if known is None or not known.path.startswith((f"{tree}/", f"{PUBLISHED}/")):
                with folder.reader(entry.name) as file:
                    known = objects.put(self._owner, tree, file)
            self._put_before[_version(entry)] = files[entry.name] = known
        objects.name_files(self._owner, tree, TreeManifest(host=self.claim.ref.host, files=files))

    def _fetch_state(self, objects: ObjectStore) -> None:
        """Fetch the last attempt's state, in place of an earlier one's here."""
        if (found := newest_state(objects, self.claim.ref.job_id)) is None:
            return
        attempt, manifest = found
        if manifest.host == self.claim.ref.host and self._paths.attempt(attempt).exists():
            return  # it ran here: this folder has all of it, and maybe more
        self._paths.root.mkdir(parents=True, exist_ok=True)
        steps = {step_of(name) for name in manifest.files}
        with Folder.open(self._paths.root) as root, root.make(self._paths.checkpoints.name) as checkpoints:
            for name in checkpoints.names():
                if step_of(f"{checkpoints.path.name}/{name}/") not in steps:
                    checkpoints.remove(name)
            _fetch_files(objects.tree(self._owner, manifest).files, root)

    def _fetch_job(self, objects: ObjectStore, job_id: str, step: int | None) -> None:
        """Fetch another job's artifacts, and its checkpoint of ``step``, or the newest one if that is None."""
        owner, paths = job_files(job_id), self.layout.job(job_id)
        files = {
            f"{paths.artifacts.name}/{each.name}": RemoteFile(
                objects, f"{owner}/{PUBLISHED}/{each.sha256}", each.sha256, each.bytes
            )
            for each in self.artifacts.list(job_id)
            if each.sha256
        }
        if (found := newest_state(objects, job_id)) is not None:
            left = objects.tree(owner, found[1]).files
            steps = [step_of(name) or 0 for name in left]
            wanted = max(steps, default=0) if step is None else step
            files |= {name: file for name, file in left.items() if step_of(name) == wanted}
        paths.root.mkdir(parents=True, exist_ok=True)
        with Folder.open(paths.root) as root:
            _fetch_files(files, root)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            self._repeat(act, self.settings.report_within_s)
        except OSError as error:
            self.fault = self.fault or str(error)

    def _repeat(self, act: Callable[[], None], within_s: float) -> None:
        """Repeat an action until it succeeds; raise its last error after so many seconds, or once the attempt is
        lost.
        """
        deadline, pause = time.monotonic() + within_s, _FIRST_PAUSE_S
        while True:
            try:
                return act()
            except OSError as error:
                if time.monotonic() + pause > deadline or self.is_lost():
                    raise
                logger.warning("the object store failed; asking again: %s", error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _fetch_files(files: dict[str, RemoteFile], root: Folder) -> None:
    """Fetch files; the files that make a checkpoint complete come last."""
    for name in sorted(files, key=lambda name: (name.endswith(f"/{META}"), name)):
        files[name].store.fetch(files[name], root, name)


def _is_kept(name: str, steps: set[int]) -> bool:
    """Return whether the next attempt can use a file: not a draft, and not part of an incomplete checkpoint."""
    if any(part.startswith(".") for part in name.split("/")):
        return False
    step = step_of(name)
    return step is None or step in steps


def _version(entry: Entry) -> _Version:
    return entry.status.st_ino, entry.status.st_size, entry.status.st_mtime_ns
