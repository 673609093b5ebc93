"""Knows the machine that a process is on: its processes, its supervisors, its load, and what is private to its user.

``embedded_broker`` is imported by its own name: only what starts a broker needs a client of Redis.
"""

from service.jobs.host.load import overcommitment
from service.jobs.host.private import (
    NotPrivateError,
    PrivateSocket,
    check_owned,
    close_to_others,
    read_private,
    socket_address,
)
from service.jobs.host.processes import LockedError, Process, ProcessLock, end_processes, holders
from service.jobs.host.settings_file import ENV_PREFIX, config_file, in_file
from service.jobs.host.supervisor_registry import SupervisorRegistry

__all__ = [
    "ENV_PREFIX",
    "LockedError",
    "NotPrivateError",
    "PrivateSocket",
    "Process",
    "ProcessLock",
    "SupervisorRegistry",
    "check_owned",
    "close_to_others",
    "config_file",
    "end_processes",
    "holders",
    "in_file",
    "overcommitment",
    "read_private",
    "socket_address",
]
