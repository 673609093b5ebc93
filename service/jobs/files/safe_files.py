"""Opens, lists, writes and removes files in folders where ranks may write, safely, whatever they have put there.

A path may lead elsewhere a moment later. So everything here goes by descriptors: a name is looked up below a folder
that is held open, no step of it may be a link, a file is inspected through its descriptor, and nothing waits for the
other end of a pipe. Errors are :class:`OSError` with the path that is meant.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

_OPENAT2 = 437
_RESOLVE = 0x02 | 0x04 | 0x08
"""No magic links, no symbolic links, nothing outside the folder."""
_TRIES = 8
"""``openat2`` gives up if something is renamed meanwhile; a walk does not."""
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY

_libc = ctypes.CDLL(None, use_errno=True)


class UnsafePathError(OSError):
    """A link, a pipe or something else stands where a file or folder should be."""


@dataclass(frozen=True)
class Entry:
    """A regular file below a folder, as it was when it was listed."""

    name: str
    """The path below the folder."""
    status: os.stat_result


class Folder:
    """A folder, held by its descriptor until :meth:`close`; use it as a context manager. Names are relative paths below
    it.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor, self.path = descriptor, path

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a folder that is itself no link. Folders above it are trusted: no rank may write there."""
        with _name_path_in_errors(path):
            return cls(os.open(path, _FOLDER | _ALWAYS), path)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def folder(self, name: str) -> Folder:
        """Open a folder below this one."""
        return Folder(self._open(name, _FOLDER), self.path / name)

    def make(self, name: str, mode: int = 0o777) -> Folder:
        """Open a folder below this one; make it, and those above it, where they are missing."""
        found = Folder(os.dup(self.descriptor), self.path)
        for part in _parts(name):
            with found, _name_path_in_errors(found.path / part):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, mode, dir_fd=found.descriptor)
                found = found.folder(part)
        return found

    def handle(self, name: str) -> int:
        """Return a descriptor (``O_PATH``) of a file or folder, for a grant."""
        descriptor = self._open(name, os.O_PATH)
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UnsafePathError(errno.ELOOP, "a link", str(self.path / name))
        return descriptor

    def reader(self, name: str) -> BinaryIO:
        """Open a regular file for reading."""
        return self._regular(name, os.O_RDONLY, "rb")

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a regular file. Raises :class:`UnsafePathError` if it has more than ``most``
        bytes.
        """
        with self.reader(name) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise UnsafePathError(errno.EFBIG, f"more than {most} bytes", str(self.path / name))
        return content

    def create(self, name: str, mode: int = 0o666) -> BinaryIO:
        """Make a file that is not there yet, and open it for writing at its end."""
        return self._regular(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, "ab", mode)

    def append(self, name: str) -> BinaryIO:
        """Open a file for writing at its end; make it where it is missing. It must have no second name."""
        try:
            return self.create(name)
        except FileExistsError:
            file = self._regular(name, os.O_WRONLY | os.O_APPEND, "ab")
        if os.fstat(file.fileno()).st_nlink != 1:
            file.close()
            raise UnsafePathError(errno.EMLINK, "a file with other names", str(self.path / name))
        return file

    def write(self, name: str, content: bytes) -> None:
        """Replace a file in one step, as :func:`service.jobs.files.atomic.atomic_write` does."""
        *above, last = _parts(name)
        with self.folder("/".join(above)) if above else self._again() as folder:
            with folder.replacing(last) as file:
                file.write(content)
            os.fsync(folder.descriptor)

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """Open a draft that becomes the file of this name, directly in this folder, if the block ends without an
        error.
        """
        draft = f".{name}.{uuid.uuid4().hex}.part"
        try:
            with self.create(draft) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.rename(draft, name)
        finally:
            self.unlink(draft)

    def link(self, file: BinaryIO, name: str) -> None:
        """Give an open file one more name, directly in this folder."""
        with _name_path_in_errors(self.path / name):
            os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=self.descriptor)

    def rename(self, old: str, new: str) -> None:
        """Rename what is directly in this folder; what had the new name is replaced."""
        with _name_path_in_errors(self.path / old):
            os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file, link or pipe directly in this folder, if it is there."""
        with _name_path_in_errors(self.path / name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def names(self) -> list[str]:
        """Return the names of all that is directly in this folder, in order."""
        with _name_path_in_errors(self.path):
            return sorted(os.listdir(self.descriptor))  # noqa: PTH208 - pathlib knows no descriptors

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a name directly in this folder, of a link itself; None if nothing is there."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def files(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the regular files below this folder, in order of their names; links and what cannot be opened are left
        out.
        """
        waiting = [iter(self.names())]
        folders = [(self, prefix)]
        try:
            while waiting:
                folder, above = folders[-1]
                name = next(waiting[-1], None)
                if name is None:
                    waiting.pop()
                    if folders.pop()[0] is not self:
                        folder.close()
                    continue
                found = folder.status(name)
                if found is not None and stat.S_ISREG(found.st_mode):
                    yield Entry(f"{above}{name}", found)
                elif found is not None and stat.S_ISDIR(found.st_mode) and len(folders) < _DEEPEST:
                    with contextlib.suppress(OSError):
                        below = folder.folder(name)
                        folders.append((below, f"{above}{name}/"))
                        waiting.append(iter(()))  # also of one that cannot be listed: both lists go in step
                        waiting[-1] = iter(below.names())
        finally:
            for folder, _ in folders[1:]:
                folder.close()

    def remove(self, name: str) -> None:
        """Remove a name directly in this folder, if it is there, and all below it, however deep and whatever
        its modes.
        """
        with contextlib.suppress(FileNotFoundError):
            if _unlinked(self.descriptor, name):
                return
            with self._opened_up(name) as top:
                while names := top.names():
                    for each in names:
                        top._flatten(each)
            with _name_path_in_errors(self.path / name):
                os.rmdir(name, dir_fd=self.descriptor)

    def _flatten(self, name: str) -> None:
        """Remove everything here, files included; folders in it move up to this one, so that depth costs no
        descriptors.
        """
        if _unlinked(self.descriptor, name):
            return
        with self._opened_up(name) as folder:
            for each in folder.names():
                if not _unlinked(folder.descriptor, each):
                    folder._opened_up(each).close()  # a folder that moves must be writable itself
                    above = uuid.uuid4().hex
                    os.rename(each, above, src_dir_fd=folder.descriptor, dst_dir_fd=self.descriptor)
        with _name_path_in_errors(self.path / name):
            os.rmdir(name, dir_fd=self.descriptor)

    def _opened_up(self, name: str) -> Folder:
        """Open a folder after its owner has every right in it."""
        descriptor = self.handle(name)
        try:
            if os.fstat(descriptor).st_mode & 0o700 != 0o700:
                os.chmod(f"/proc/self/fd/{descriptor}", 0o700)  # noqa: PTH101 - what it leads to is held
        finally:
            os.close(descriptor)
        return self.folder(name)

    def _again(self) -> Folder:
        return Folder(os.dup(self.descriptor), self.path)

    def _regular(self, name: str, flags: int, how: str, mode: int = 0) -> BinaryIO:
        descriptor = self._open(name, flags, mode)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UnsafePathError(errno.EINVAL, "no regular file", str(self.path / name))
        return cast(BinaryIO, os.fdopen(descriptor, how))

    def _open(self, name: str, flags: int, mode: int = 0) -> int:
        with _name_path_in_errors(self.path / name):
            parts = _parts(name)
            found = _openat2(self.descriptor, "/".join(parts), flags, mode) if _has_openat2() else None
            return _walk(self.descriptor, parts, flags, mode) if found is None else found


_DEEPEST = 64
"""The deepest nesting that is listed; each level holds a descriptor."""


def remove_tree(path: Path) -> None:
    """Remove a folder, or whatever is there, with all below it; what cannot be removed stays."""
    with contextlib.suppress(OSError), Folder.open(path.parent) as above:
        above.remove(path.name)


def _parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise UnsafePathError(errno.EXDEV, "no path below the folder", name)
    return path.parts


@contextlib.contextmanager
def _name_path_in_errors(path: Path) -> Iterator[None]:
    """Make an error name the intended path, and say that it is a link."""
    try:
        yield
    except UnsafePathError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENOTDIR):
            raise UnsafePathError(error.errno, "a link or no folder, or behind one", str(path)) from error
        error.filename, error.filename2 = str(path), None
        raise


def _walk(folder: int, parts: tuple[str, ...], flags: int, mode: int) -> int:
    """Open one step after the other."""
    held = os.dup(folder)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER | _ALWAYS, dir_fd=held)
            os.close(held)
            held = below
        return os.open(parts[-1], flags | _ALWAYS, mode, dir_fd=held)
    finally:
        os.close(held)


def _openat2(folder: int, name: str, flags: int, mode: int) -> int | None:
    """Open a path in one system call; None if the kernel gives up because something was renamed meanwhile."""
    always = os.O_CLOEXEC if flags & os.O_PATH else _ALWAYS
    how = struct.pack("QQQ", flags | always, mode, _RESOLVE)
    for _ in range(_TRIES):
        found = _libc.syscall(_OPENAT2, ctypes.c_int(folder), os.fsencode(name), how, ctypes.c_size_t(len(how)))
        if found >= 0:
            return int(found)
        if (number := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), name)
    return None


@functools.cache
def _has_openat2() -> bool:
    """Return whether the kernel (Linux 5.6), and the container's filter, know the call."""
    how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0)
    found = _libc.syscall(_OPENAT2, ctypes.c_int(-100), b"/", how, ctypes.c_size_t(len(how)))
    if found >= 0:
        os.close(found)
    return bool(found >= 0)


def _unlinked(folder: int, name: str) -> bool:
    """Remove anything but a folder; return False for a folder."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode):
        return False
    os.unlink(name, dir_fd=folder)
    return True
