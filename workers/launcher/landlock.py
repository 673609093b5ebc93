"""Confines a process by Landlock (Linux 5.19): it gives up, with all its children, every file that it was not granted.

Needs no privilege. Only grants exist: everything below a granted path is granted with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.jobs.files import Folder, UnsafePathError
from service.linux import checked, forbid_new_privileges

MINIMUM_ABI = 2
"""The first version that lets a process rename between its folders, as compilers' caches do."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_SYM = (
    1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 12,
)  # fmt: skip
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_ALL = (1 << 13) - 1
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGE = (
    _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SOCK | _MAKE_FIFO | _MAKE_SYM | _REFER
    | _TRUNCATE
)  # fmt: skip
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the kernel's version of Landlock; 0 if it has none, or a container's filter forbids it."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))))


def restrict(
    read: Iterable[Path | Grant],
    write: Iterable[Path | Grant],
    secret: Iterable[Path] = (),
    write_files: Iterable[Path] = (),
) -> None:
    """Let the calling thread, and its children, from now on read below ``read``, read and change below ``write``, and
    read and overwrite the existing files below ``write_files``.

    Missing paths are left out. Nothing at or below ``secret`` is granted through a path above it, whose names stay
    visible. Held files are granted by descriptor, whatever their path leads to by now. Raises :class:`OSError`. With
    version 6 (Linux 6.12), signals and abstract sockets reach only processes under the same restriction; with any
    version, other processes' memory and environment are out of reach.
    """
    ruleset, handled = _make_ruleset()
    hidden = [path.resolve() for path in secret]
    try:
        for paths, rights in ((read, _READ), (write, _READ | _CHANGE), (write_files, _READ | _WRITE_FILE | _TRUNCATE)):
            for each in paths:
                _grant_below(ruleset, each, rights & handled, hidden)
        forbid_new_privileges()
        checked("Landlock", _libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    finally:
        os.close(ruleset)


def _make_ruleset() -> tuple[int, int]:
    """Return a ruleset's descriptor, and the rights that it takes away from whatever is not granted."""
    version = abi()
    handled = _ALL | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, 0, scoped) if version >= 6 else struct.pack("Q", handled)
    made = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    return checked("Landlock", made), handled


def _grant_below(ruleset: int, given: Path | Grant, rights: int, hidden: list[Path]) -> None:
    """Grant rights at and below a path, but for what is hidden there."""
    path = given.path if isinstance(given, Grant) else given.resolve()
    for granted, only_names in _without(path, hidden):
        allowed = _READ_DIR if only_names else rights
        if isinstance(given, Grant) and granted == path:
            _add_rule(ruleset, given.descriptor, allowed)
        else:
            _grant(ruleset, granted, allowed)


def _without(path: Path, secret: list[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield ``path``, or, if secrets lie below it, everything beside them; true for a folder whose names alone are
    granted.
    """
    if path in secret:
        return
    if not any(each.is_relative_to(path) for each in secret):
        yield path, False
        return
    yield path, True
    with contextlib.suppress(OSError):
        for child in path.iterdir():
            if not child.is_symlink():
                yield from _without(child, secret)


def _grant(ruleset: int, path: Path, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it does not exist or may not be opened: there is nothing to grant
        return
    try:
        _add_rule(ruleset, handle, rights)
    finally:
        os.close(handle)


def _add_rule(ruleset: int, handle: int, rights: int) -> None:
    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        rights &= _OF_FILES
    rule = struct.pack("=Qi", rights, handle)
    checked(
        "Landlock",
        _libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)),
    )


class UnsafeGrantError(Exception):
    """A link stands in the place of a path that a spec names."""


@dataclass(frozen=True)
class Grant:
    """An open file or folder (``O_PATH``), and the path to it, without links."""

    path: Path
    descriptor: int


@contextmanager
def held(paths: Iterable[Path], covered: Iterable[Path]) -> Iterator[list[Grant]]:
    """Hold those of ``paths`` that exist while the block runs.

    Raises :class:`UnsafeGrantError` for a path below a covered folder that leads over a link; the operator's own
    paths may be links.
    """
    roots = list(covered)
    with ExitStack() as stack:
        grants = []
        for path in paths:
            try:
                grant = _open(path, next((root for root in roots if path.is_relative_to(root) and path != root), None))
            except UnsafePathError as error:
                raise UnsafeGrantError(f"{path}, which a job was to use, leads over a link: {error}") from error
            except OSError:  # it does not exist or may not be opened: there is nothing to grant
                continue
            stack.callback(os.close, grant.descriptor)
            grants.append(grant)
        yield grants


def _open(path: Path, root: Path | None) -> Grant:
    if root is None:
        resolved = path.resolve()
        return Grant(resolved, os.open(resolved, os.O_PATH | os.O_CLOEXEC))
    with Folder.open(root.resolve()) as folder:
        name = path.relative_to(root)
        return Grant(folder.path / name, folder.handle(name.as_posix()))
