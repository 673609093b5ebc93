"""Leaves of a part that ended, and reported its end, what somebody may still read, in as few files as that takes."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from pathlib import PurePosixPath

from service.jobs.events import log_file, pack
from service.jobs.files import Folder, JobPaths
from service.jobs.records import Artifact
from service.jobs.runtime import GATE_ARTIFACTS, RESULT, SPEC
from workers.rank.stacks import stacks_file

_MOST_COMPARED = 1 << 20
"""Larger files were linked when they were published."""


def tidy(paths: JobPaths, number: int, ranks: Iterable[int]) -> None:
    """Remove what only the ranks of this attempt read, what stayed empty, and the result, which the record has."""
    folder = paths.attempt(number)
    with contextlib.suppress(OSError), Folder.open(folder) as attempt:
        for name in (each(folder, rank).name for rank in ranks for each in (stacks_file, log_file)):
            found = attempt.status(name)
            if found is not None and found.st_size == 0:
                attempt.remove(name)
        attempt.remove(GATE_ARTIFACTS)
        work = paths.work(number)
        with attempt.folder(work.name) as ours:
            ours.remove(RESULT)
            is_empty = not ours.names()
        if is_empty:
            attempt.remove(work.name)


def compact(paths: JobPaths, number: int) -> None:
    """Pack the record of an attempt with which its job succeeded, and remove the spec, which the broker has."""
    with contextlib.suppress(OSError), Folder.open(paths.attempt(number)) as attempt:
        attempt.remove(SPEC)
        pack(attempt)


def share_contents(paths: JobPaths, manifest: Iterable[Artifact]) -> None:
    """Give each artifact that is still what was published the same file, once no attempt can write to it any more."""
    with contextlib.suppress(OSError), Folder.open(paths.root) as root, root.folder(paths.published.name) as published:
        for artifact in manifest:
            if artifact.sha256 and artifact.bytes <= _MOST_COMPARED:
                with contextlib.suppress(OSError):
                    _share(root, published, PurePosixPath(paths.artifacts.name, artifact.name), artifact.sha256)


def _share(root: Folder, published: Folder, place: PurePosixPath, digest: str) -> None:
    with root.folder(str(place.parent)) as folder, published.reader(digest) as kept:
        with folder.reader(place.name) as own:
            if os.path.sameopenfile(own.fileno(), kept.fileno()) or own.read() != kept.read():
                return
        draft = f".{uuid.uuid4().hex}"
        folder.link(kept, draft)
        folder.rename(draft, place.name)
