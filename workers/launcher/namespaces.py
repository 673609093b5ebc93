"""Gives a group a network and a view of the files of its own, by Linux namespaces, unprivileged where the host allows.

A user namespace comes first, while the process has one thread: in it, the process may make the others. The
process keeps its user, and gives up all privileges in the namespace once the others are made.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from service.linux import checked
from workers.launcher.landlock import Grant

_NEW_NETWORK, _NEW_USER, _NEW_MOUNTS, _NEW_IPC = 0x40000000, 0x10000000, 0x00020000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 19
_MOUNT_SETATTR, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, 0x8000, 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION = 0x20080522
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - covered, before anything is written there

_libc = ctypes.CDLL(None, use_errno=True)


def enter_user_namespace() -> bool:
    """Return whether this process, which must have one thread, is now in a user namespace of its own, as the same
    user.
    """
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_USER) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    return True


def isolate_network() -> None:
    """Leave the host's network for an empty one that has its own loopback. Raises :class:`OSError`."""
    checked("a network namespace", _libc.unshare(_NEW_NETWORK))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def own_mounts() -> None:
    """Leave the host's view of the files for a copy, in which :func:`hide` covers some. Raises :class:`OSError`."""
    checked("a mount namespace", _libc.unshare(_NEW_MOUNTS))
    _mount("none", Path("/"), flags=_MS_REC | _MS_SLAVE)


def hide(covered: Iterable[Path], keep: Iterable[Grant]) -> None:
    """Cover folders so that they show only ``keep``, opened since :func:`own_mounts`, and files so that they are empty.

    Raises :class:`OSError`.
    """
    kept = sorted({each.path: each for each in keep}.values(), key=lambda each: len(each.path.parts))
    for path in sorted({path.resolve() for path in covered}, key=lambda path: len(path.parts)):
        if path.is_dir():
            _cover(path, [each for each in kept if each.path != path and each.path.is_relative_to(path)])
        elif path.exists():  # unless it is below a covered folder
            _mount("/dev/null", path, flags=_MS_BIND)


def own_shared_memory(most_bytes: int) -> bool:
    """Leave the host's shared memory: System V segments, semaphores, message queues and ``/dev/shm`` are empty
    from now on, and end with the last process here. Return whether ``most_bytes`` limits both segments and
    files: before Linux 6.10, segments have no limit. Needs the mount namespace that :func:`own_mounts` makes. Raises
    :class:`OSError`.
    """
    checked("an IPC namespace", _libc.unshare(_NEW_IPC))
    if _SHARED_MEMORY.is_dir():
        options = f"mode=1777,size={most_bytes}"
        _mount("tmpfs", _SHARED_MEMORY, kind="tmpfs", flags=_MS_NOSUID | _MS_NODEV, options=options)
    pages = max(1, most_bytes // os.sysconf("SC_PAGE_SIZE"))
    try:
        Path("/proc/sys/kernel/shmall").write_text(str(pages))
    except OSError:
        return False
    return True


def protect_kernel_settings() -> None:
    """Make ``/proc``, except for processes, read-only, even for root. Needs the mount namespace that
    :func:`own_mounts` makes, and Linux 5.12. Raises :class:`OSError`.
    """
    for path in _kernel_settings():
        _mount(str(path), path, flags=_MS_BIND | _MS_REC)
        _set_attributes(path, _AT_RECURSIVE, on=_MOUNT_ATTR_RDONLY)


def write_only_in(writable: Sequence[Grant], *also: Path) -> None:
    """Make all mounts read-only except ``writable``, shared memory and the mounts at ``also``.

    Landlock governs opening; this also governs modes, times, owners and attributes. It has the needs of
    :func:`protect_kernel_settings`. Raises :class:`OSError`.
    """
    for each in sorted(writable, key=lambda each: len(each.path.parts)):
        _mount(f"/proc/self/fd/{each.descriptor}", each.path, flags=_MS_BIND | _MS_REC)
    places = [*(each.path for each in writable), *(path for path in (_SHARED_MEMORY, *also) if path.is_dir())]
    again = [path for path in places if not os.statvfs(path).f_flag & os.ST_RDONLY]
    _set_attributes(Path("/"), _AT_RECURSIVE, on=_MOUNT_ATTR_RDONLY)
    for path in again:
        _set_attributes(path, 0, off=_MOUNT_ATTR_RDONLY)


def _set_attributes(path: Path, flags: int, *, on: int = 0, off: int = 0) -> None:
    words = struct.pack("QQQQ", on, off, 0, 0)
    found = _libc.syscall(_MOUNT_SETATTR, -1, os.fsencode(path), flags, words, ctypes.c_size_t(len(words)))
    checked(f"setting what may be written below {path}", found)


def _kernel_settings() -> Iterator[Path]:
    """Yield the folders and writable files in ``/proc`` that belong to no process.

    Processes end meanwhile, and their folders with them, so they are recognised by name before anything is read.
    """
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            continue
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and mode & 0o222):
            yield path


def _cover(folder: Path, keep: list[Grant]) -> None:
    _mount("tmpfs", folder, kind="tmpfs", flags=_MS_NOSUID | _MS_NODEV, options="mode=0755,size=1m")
    for path, handle in ((each.path, each.descriptor) for each in keep):
        if not path.exists():  # a path below another kept one is there already
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                path.mkdir()
            else:
                path.touch()
            _mount(f"/proc/self/fd/{handle}", path, flags=_MS_BIND | _MS_REC)
    _mount("none", folder, flags=_MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def drop_capabilities() -> None:
    """Give up every capability for good: programs that root starts have none either. Raises :class:`OSError`."""
    number = 0
    while _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    checked("dropping capabilities", _libc.capset(header, none))


def _mount(source: str, target: Path, *, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    words = (source.encode(), os.fsencode(target), None if kind is None else kind.encode())
    result = _libc.mount(*words, ctypes.c_ulong(flags), None if options is None else options.encode())
    checked(f"mounting over {target}", result)
