"""Keeps the folder of what ranks made of uploaded files within a limit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IN_USE_S = 3600.0
"""A job that starts opens its files within so long; what was used later than that stays, whatever the limit."""
ABANDONED_S = 86_400.0
"""What was being made for longer belongs to nobody."""


def used(path: Path) -> None:
    """Note that an entry is used now, so that others are deleted before it."""
    os.utime(path)


def trim(cache: Path, limit: int) -> list[Path]:
    """Delete the entries that were not used for longest until ``limit`` bytes are left; returns their paths.

    An entry is a file or folder in a folder of the cache. Several hosts may trim one cache at a time.
    """
    now, gone = time.time(), []
    entries = sorted(_entries(cache), key=lambda entry: entry.used_at)
    for entry in entries:
        if entry.path.name.startswith(".") and now - entry.used_at > ABANDONED_S:
            _delete(entry.path)
    kept = [entry for entry in entries if not entry.path.name.startswith(".")]
    total = sum(entry.size for entry in kept)
    for entry in kept:
        if total <= limit or now - entry.used_at < IN_USE_S:
            break
        _discard(entry.path)
        gone.append(entry.path)
        total -= entry.size
    return gone


@dataclass(frozen=True)
class _CacheEntry:
    path: Path
    size: int
    used_at: float


def _entries(cache: Path) -> Iterator[_CacheEntry]:
    for path in cache.glob("*/*"):
        try:
            found = path.stat()
            size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else found.st_size
        except FileNotFoundError:  # another host was faster
            continue
        yield _CacheEntry(path, size, found.st_mtime)


def _discard(path: Path) -> None:
    """Delete an entry, which is gone at once: under a name that nobody looks for while it is being deleted."""
    aside = path.with_name(f".deleting-{path.name}")
    try:
        path.rename(aside)
    except OSError:
        return
    _delete(aside)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
