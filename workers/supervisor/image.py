"""Detects whether modules and packages on disk still are those that this process imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_CLOCK_OF_FILES = 5
"""``CLOCK_REALTIME_COARSE``, which dates changes in file systems."""
_Stamp = tuple[int, ...]
_METADATA = (".dist-info", ".egg-info", ".pth", ".egg-link")
"""Suffixes of the names by which Python's search folders list packages."""
_WATCHED = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""Modified, attributes, moved from and to, created, deleted, itself deleted and moved: the kernel's ``IN_…``."""
_NONBLOCKING, _CLOSE_ON_EXEC = os.O_NONBLOCK, os.O_CLOEXEC
_LOCAL_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010}
"""ext, XFS, Btrfs, tmpfs, overlayfs, ZFS, F2FS: nothing changes there without this kernel, which tells of it."""

_libc = ctypes.CDLL(None, use_errno=True)


class ImportedImage:
    """The imports since :meth:`before_imports`. :meth:`change` always compares with that moment; if the kernel
    reports changes, it checks files only after a report.
    """

    def __init__(self, began_ns: int, packages: dict[str, _Stamp]) -> None:
        self._began_ns, self._packages = began_ns, packages
        self._files: dict[str, _Stamp | None] = {}
        self._watch = _Watch()

    @classmethod
    def before_imports(cls) -> ImportedImage:
        """Begin. A file that changes from now on may have been imported before or after its change."""
        return cls(time.clock_gettime_ns(_CLOCK_OF_FILES), _packages())

    def take(self) -> None:
        """Note the modules imported so far."""
        names = {name for module in list(sys.modules.values()) if (name := _file_of(module))}
        folders = {os.path.dirname(name) for name in names}  # noqa: PTH120 - thousands of them
        self._watch.begin({*folders, *_search_path(), *self._packages})
        self._files = {name: _stamp(name) for name in names}

    def change(self) -> str:
        """Return the changes since the imports, for people; empty if there are none."""
        if not self._watch.has_news():
            return ""
        if _packages() != self._packages:
            return "packages were installed, removed or changed"
        for name, stamp in self._files.items():
            if stamp is None or _stamp(name) != stamp or stamp[-1] >= self._began_ns:
                return f"{name} was changed"
        return ""


class _Watch:
    """Tells, in one system call, whether anything changed in folders; always true if the kernel cannot say."""

    def __init__(self) -> None:
        self._queue = -1
        self._is_certain = False
        self._is_new = True

    def begin(self, folders: set[str]) -> None:
        """Watch these folders, without those below them."""
        self._queue = int(_libc.inotify_init1(_NONBLOCKING | _CLOSE_ON_EXEC))
        there = {folder for folder in folders if os.path.isdir(folder)}  # noqa: PTH112 - hundreds of them
        self._is_certain = self._queue >= 0 and all(map(_is_local, there)) and all(map(self._add, there))

    def has_news(self) -> bool:
        if self._is_new or not self._is_certain:
            self._is_new = False
            return True
        with contextlib.suppress(BlockingIOError):
            while os.read(self._queue, 1 << 16):
                self._is_new = True  # and check again later, since this check may have been too early
        return self._is_new

    def _add(self, folder: str) -> bool:
        return bool(_libc.inotify_add_watch(self._queue, os.fsencode(folder), ctypes.c_uint32(_WATCHED)) >= 0)


def _is_local(folder: str) -> bool:
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(folder), buffer) != 0:
        return False
    return (struct.unpack_from("l", buffer)[0] & 0xFFFFFFFF) in _LOCAL_FILE_SYSTEMS


def _file_of(module: object) -> str | None:
    """Return the file that a module, or the archive that it is in, was loaded from."""
    name = getattr(module, "__file__", None)
    if not isinstance(name, str) or not os.path.isabs(name):  # noqa: PTH117 - built in, or made by a program
        return None
    archive = getattr(getattr(module, "__loader__", None), "archive", None)
    return archive if isinstance(archive, str) else name


def _stamp(name: str) -> _Stamp | None:
    try:
        found = os.stat(name)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _search_path() -> Iterator[str]:
    yield from (os.path.realpath(entry) for entry in sys.path)


def _packages() -> dict[str, _Stamp]:
    """Return the entries that show which packages are installed, and which plugins they declare, where Python
    searches.
    """
    found = {}
    for place in _search_path():
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if entry.name.endswith(_METADATA):
                    declared = _stamp(str(Path(entry.path, "entry_points.txt"))) or ()
                    found[entry.path] = (*(_stamp(entry.path) or ()), *declared)
    return found
