"""Knows the machine that a process is on: its processes, its supervisors, its load, and what is private to its user.

What looks at processes is loaded when it is first asked for: a client does without psutil. ``embedded_broker`` is
imported by its own name: only what starts a broker needs a client of Redis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from service.jobs.host.isolation import ISOLATION_PARTS
from service.jobs.host.listening import bind_port, url_of
from service.jobs.host.private import (
    NotPrivateError,
    PrivateSocket,
    check_owned,
    close_to_others,
    read_private,
    socket_address,
)
from service.jobs.host.process_lock import LockedError, ProcessLock
from service.jobs.host.settings_file import ENV_PREFIX, config_file, in_file

if TYPE_CHECKING:
    from service.jobs.host.load import overcommitment
    from service.jobs.host.processes import Process, end_processes, holders, take_over, wait_or_kill
    from service.jobs.host.supervisor_registry import SupervisorRegistry

__all__ = [
    "ENV_PREFIX",
    "ISOLATION_PARTS",
    "LockedError",
    "NotPrivateError",
    "PrivateSocket",
    "Process",
    "ProcessLock",
    "SupervisorRegistry",
    "bind_port",
    "check_owned",
    "close_to_others",
    "config_file",
    "end_processes",
    "holders",
    "in_file",
    "overcommitment",
    "read_private",
    "socket_address",
    "take_over",
    "url_of",
    "wait_or_kill",
]

_HOMES = {
    "Process": "processes",
    "SupervisorRegistry": "supervisor_registry",
    "end_processes": "processes",
    "holders": "processes",
    "overcommitment": "load",
    "take_over": "processes",
    "wait_or_kill": "processes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
