"""Gets devices for jobs from a scheduler that a cluster has.

A launcher answers two questions: how devices are asked for (and the request seen, and taken back), and, in the process
that the scheduler starts on each host of what it gave, what that host has. All else is the same for each of them and
for the hosts of the service: that process reports its host, begins the attempt once all hosts are there and starts a
supervisor (:mod:`workers.agent.allocated_host`), and lease, fencing, events, cancelling and checkpoints are the
supervisor's and the store's. A worker that names launchers in its settings asks them (:mod:`workers.agent.launching`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from service.jobs.launchers import PendingLaunch, launchers, unknown_launcher

Pool = Literal["cuda", "cpu"]


class LauncherUnavailable(Exception):  # noqa: N818
    """The scheduler did not answer, or refused; the message says what it said. It is asked again."""


@dataclass(frozen=True)
class AllocationRequest(PendingLaunch):
    """Asks for devices for one attempt of a job."""

    command: tuple[str, ...]
    """To be run once on each host, with SIGTERM some time before its devices are taken away."""


@dataclass(frozen=True)
class Booking:
    """Describes what a scheduler was asked for and has not taken back."""

    id: str
    """What :class:`AllocatedHost` will have: another each time that the scheduler starts it again."""
    job_id: str
    is_waiting: bool
    """Whether it has no devices yet. What has them, and on which no attempt begins in time, is taken back."""
    reason: str = ""
    """Why it has none yet, in the scheduler's words."""
    is_given_up: bool = False
    """Whether it has none and the scheduler will give it none by itself: it is taken back, and asked for anew."""


@dataclass(frozen=True)
class AllocatedHost:
    """Describes one host of an allocation, as the process sees it that the scheduler has started there."""

    allocation: str
    index: int
    count: int
    """Hosts of the allocation; the first, of index 0, leads."""
    pool: Pool
    devices: int
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the scheduler says of the allocation, for accounting."""


@dataclass(frozen=True)
class LauncherContext:
    """Tells a launcher whose it is."""

    service: str
    """Tells what this service asked for from what others of the same user did."""
    folder: Path
    """A private folder, which all hosts of the scheduler share; what allocations print belongs there, as ``*.log``."""
    options: str
    """The operator's, for the scheduler."""
    stop_grace_s: float
    """Seconds that ranks get to write a checkpoint after SIGTERM."""


class Launcher(ABC):
    """Asks one scheduler. All may raise :class:`LauncherUnavailable`, and are called again after a while.

    Nothing is kept here: a worker may end at any time, and another one goes on with what the scheduler tells.
    """

    starts_within_s: ClassVar[float] = 300.0
    """Seconds from the devices of a request to the beginning of its attempt, on however busy hosts. Where nothing has
    begun by then, such as where a scheduler has lost a host of it, the job's devices are asked for anew.
    """

    def __init__(self, context: LauncherContext) -> None:
        self.context = context

    @abstractmethod
    def describe(self) -> str:
        """Return what the scheduler has, in a line."""

    @abstractmethod
    def request(self, request: AllocationRequest) -> str:
        """Ask for devices; return what the scheduler calls the request. Whatever is asked for must be in
        :meth:`allocations` from then on, also where this fails half-way.
        """

    @abstractmethod
    def allocations(self) -> list[Booking]:
        """Return all that this service asked for and that waits or has devices."""

    @abstractmethod
    def cancel(self, allocations: Sequence[Booking]) -> None:
        """Take requests back, and devices with SIGTERM. What is gone already does not matter."""

    @staticmethod
    @abstractmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        """Return what this process's host has, from the environment that the scheduler gave it."""


def launcher_class(name: str) -> type[Launcher]:
    """Return a launcher by name. Raises ``ValueError`` for one that is not installed, or is none."""
    module, _, attribute = launchers().get(name, "").partition(":")
    if not module:
        raise ValueError(unknown_launcher(name))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"launcher {name}: there is no module {error.name}; pip install 'trivet[{name}]'") from error
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ValueError(f"launcher {name}: {module}:{attribute} is no workers.launchers.Launcher")  # noqa: TRY004
    return found
