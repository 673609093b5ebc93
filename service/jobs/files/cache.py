"""Keeps folders of compiled code, and those that ranks derived from uploads, within a limit."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.jobs.files.safe_files import Folder, UnsafePathError

IN_USE_S = 3600.0
"""A starting job opens its files within this time; an entry used more recently stays, whatever the limit."""
ABANDONED_S = 86_400.0
"""The age at which a partial entry counts as abandoned and is deleted."""


OF_OWNER = "of-"
"""The first part of the name of a folder with a cache of one owner's jobs."""


def used(path: Path) -> None:
    """Mark an entry as used now, so that others are deleted before it."""
    os.utime(path)


def trim(cache: Path, limit: int, *, of_owners: bool = False) -> list[Path]:
    """Delete the least recently used entries until ``limit`` bytes are left; return their paths.

    An entry is a file or folder in a folder of the cache, or of an owner's part of it; ``of_owners`` means only such
    parts. Several hosts may trim one cache at a time.
    """
    try:
        with Folder.open(cache) as folder:
            return _trim(folder, limit, of_owners=of_owners)
    except (FileNotFoundError, PermissionError, UnsafePathError):  # anybody may take the name of a folder in /tmp
        return []


def _trim(cache: Folder, limit: int, *, of_owners: bool) -> list[Path]:
    now, gone = time.time(), []
    entries = sorted(_entries(cache, of_owners=of_owners), key=lambda entry: entry.used_at)
    for entry in entries:
        if entry.name.startswith(".") and now - entry.used_at > ABANDONED_S:
            _delete(cache, entry.home, entry.name)
    kept = [entry for entry in entries if not entry.name.startswith(".")]
    total = sum(entry.size for entry in kept)
    for entry in kept:
        if total <= limit or now - entry.used_at < IN_USE_S:
            break
        _discard(cache, entry)
        gone.append(cache.path / entry.home / entry.name)
        total -= entry.size
    return gone


@dataclass(frozen=True)
class _CacheEntry:
    home: str
    """The folder of the cache in which it is."""
    name: str
    size: int
    used_at: float


def _entries(cache: Folder, *, of_owners: bool) -> Iterator[_CacheEntry]:
    for home in _homes(cache, of_owners=of_owners):
        with contextlib.suppress(OSError), cache.folder(home) as folder:  # ranks may replace folders by links
            for name in folder.names():
                with contextlib.suppress(OSError):  # another host was faster
                    yield _entry(folder, home, name)


def _homes(cache: Folder, *, of_owners: bool) -> Iterator[str]:
    """Yield the folders that have entries, including those of owners' parts."""
    for name in cache.names():
        if not (of_owners or name.startswith(OF_OWNER)):
            yield name
            continue
        with contextlib.suppress(OSError), cache.folder(name) as part:
            yield from [f"{name}/{home}" for home in part.names()]


def _entry(folder: Folder, home: str, name: str) -> _CacheEntry:
    found = folder.status(name)
    if found is None:
        raise FileNotFoundError(name)
    size = found.st_size
    if stat.S_ISDIR(found.st_mode):
        with folder.folder(name) as below:
            size = sum(each.status.st_size for each in below.files())
    return _CacheEntry(home, name, size, found.st_mtime)


def _discard(cache: Folder, entry: _CacheEntry) -> None:
    """Delete an entry. It disappears at once, because it is first renamed to a name that nobody looks up."""
    aside = f".deleting-{entry.name}"
    with contextlib.suppress(OSError), cache.folder(entry.home) as home:
        home.rename(entry.name, aside)
        _delete(cache, entry.home, aside)


def _delete(cache: Folder, home: str, name: str) -> None:
    with contextlib.suppress(OSError), cache.folder(home) as folder:
        folder.remove(name)
