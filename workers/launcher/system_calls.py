"""Refuses system calls that act on other processes of the same user beyond files and signals (seccomp).

A process may set the limits of every process of its user, and if both are unprivileged also their priorities: a limit
of one second of processor time ends a broker.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from workers.linux import forbid_new_privileges

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where a filter finds the call's number, its architecture and its arguments, 8 bytes each, the lower half first."""
_X32 = 0x40000000
_OF_PROCESS = {
    # Calls by the argument that names a process: 0 is the calling one.
    "sched_setattr": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
_ONE_PROCESS = {"setpriority": 0, "ioprio_set": 1}
"""The first argument for which the second names one process, and not all those of a group or user."""
_ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        {
            "prlimit64": 302,
            "sched_setattr": 314,
            "sched_setparam": 142,
            "sched_setscheduler": 144,
            "setpriority": 141,
            "ioprio_set": 251,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "prlimit64": 261,
            "sched_setattr": 274,
            "sched_setparam": 118,
            "sched_setscheduler": 119,
            "setpriority": 140,
            "ioprio_set": 30,
        },
    ),
}
"""How filters name an architecture, and the numbers of its calls."""

_Instruction = tuple[int, int, int, int]
_libc = ctypes.CDLL(None, use_errno=True)


def leave_other_processes_alone() -> bool:
    """Let the calling thread, and all that it starts, from now on set limits and priorities of the calling process
    only. Return false where that cannot be had: on another architecture, or a kernel without filters.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    program = list(_program(*_ARCHITECTURES[machine]))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    forbid_new_privileges()
    words = (ctypes.c_ulong(_MODE_FILTER), described, ctypes.c_ulong(0), ctypes.c_ulong(0))
    return bool(_libc.prctl(_PR_SET_SECCOMP, *words) == 0)


def _program(architecture: int, numbers: dict[str, int]) -> Iterator[_Instruction]:
    """Yield the filter, a program of classic BPF."""
    unknown = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    yield from [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), unknown]
    yield from [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), unknown]
    # A process (0 is the calling one), or no new value.
    yield from _unless(numbers["prlimit64"], [[(_argument(0), 0)], [(_argument(2), 0), (_argument(2) + 4, 0)]])
    for call, place in _OF_PROCESS.items():
        first = [(_argument(0), _ONE_PROCESS[call])] if call in _ONE_PROCESS else []
        yield from _unless(numbers[call], [[*first, (_argument(place), 0)]])
    yield (_RETURN, 0, 0, _ALLOW)


def _unless(number: int, allowed: list[list[tuple[int, int]]]) -> Iterator[_Instruction]:
    """Yield the instructions that refuse a call unless all words of one of the lists match."""
    body: list[_Instruction] = []
    for words in allowed:
        left = 2 * len(words) + 1
        for place, wanted in words:
            left -= 2
            body += [(_LOAD, 0, 0, place), (_EQUAL, 0, left, wanted)]
        body.append((_RETURN, 0, 0, _ALLOW))
    body.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    yield from [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, len(body), number), *body]


def _argument(place: int) -> int:
    return _ARGUMENTS + 8 * place
