"""Gets devices for jobs from a scheduler that a cluster has.

A launcher requests devices, lists its requests and takes them back. In the process that the scheduler starts on
each host of an allocation, it says what that host has. Everything else is the same for all launchers and for
the service's own hosts: that process reports its host, begins the attempt once all hosts are there, and starts
a supervisor (:mod:`workers.agent.allocated_host`). The supervisor and the store do lease, fencing, events,
cancelling and checkpoints. A worker that names launchers in its settings asks them (:mod:`workers.agent.launching`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from service.jobs.spec.common import PendingLaunch, launchers, unknown_launcher

Pool = Literal["cuda", "cpu"]


class LauncherUnavailable(Exception):  # noqa: N818
    """The scheduler did not answer, or refused; the message has its words. It is asked again."""


@dataclass(frozen=True)
class AllocationRequest(PendingLaunch):
    """A request for the devices of one attempt of a job."""

    command: tuple[str, ...]
    """The command to run once on each host; it gets SIGTERM some time before its devices are taken away."""


@dataclass(frozen=True)
class Booking:
    """A request that a scheduler still has, with or without devices."""

    id: str
    """The id that :class:`AllocatedHost` will have; a new one each time the scheduler starts the allocation again."""
    job_id: str
    is_waiting: bool
    """Whether it has no devices yet. Once it has them, an attempt must begin in time, or it is taken back."""
    reason: str = ""
    """Why it has none yet, in the scheduler's words."""
    is_given_up: bool = False
    """Whether it has none and the scheduler will never give it any by itself: it is taken back and made again."""


@dataclass(frozen=True)
class AllocatedHost:
    """One host of an allocation, as seen by the process that the scheduler started there."""

    allocation: str
    index: int
    count: int
    """Hosts of the allocation; the first, of index 0, leads."""
    pool: Pool
    devices: int
    facts: Mapping[str, str] = field(default_factory=dict)
    """The scheduler's data about the allocation, for accounting."""


@dataclass(frozen=True)
class LauncherContext:
    """The service that a launcher works for."""

    service: str
    """The mark that tells this service's requests from others of the same user."""
    folder: Path
    """A private folder that all hosts of the scheduler share; the output of allocations belongs there, as ``*.log``."""
    options: str
    """The operator's options for the scheduler."""
    stop_grace_s: float
    """Seconds that ranks get to write a checkpoint after SIGTERM."""


class Launcher(ABC):
    """Asks one scheduler.

    Every method may raise :class:`LauncherUnavailable` and is then called again after a while. Nothing is kept here:
    a worker may end at any time, and another one continues from the scheduler's own list.
    """

    starts_within_s: ClassVar[float] = 300.0
    """Seconds from getting devices to the beginning of the attempt, on however busy hosts. If nothing has begun
    by then, for example because a scheduler has lost one of the hosts, the job's devices are requested again.
    """

    def __init__(self, context: LauncherContext) -> None:
        self.context = context

    @abstractmethod
    def describe(self) -> str:
        """Return one line about the scheduler's devices."""

    @abstractmethod
    def request(self, request: AllocationRequest) -> str:
        """Request devices; return the scheduler's name for the request. From then on :meth:`allocations` must
        list it, even if this call fails half-way.
        """

    @abstractmethod
    def allocations(self) -> list[Booking]:
        """Return every request of this service that waits or has devices."""

    @abstractmethod
    def cancel(self, allocations: Sequence[Booking]) -> None:
        """Take requests back, and devices with SIGTERM. Requests that have already ended are no error."""

    @staticmethod
    @abstractmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        """Return this process's host, read from the environment that the scheduler gave it."""


def launcher_class(name: str) -> type[Launcher]:
    """Return a launcher by name. Raises ``ValueError`` if it is not installed, or is not a launcher."""
    module, _, attribute = launchers().get(name, "").partition(":")
    if not module:
        raise ValueError(unknown_launcher(name))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"launcher {name}: there is no module {error.name}; pip install 'trivet[{name}]'") from error
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ValueError(f"launcher {name}: {module}:{attribute} is not a workers.launchers.Launcher")  # noqa: TRY004
    return found
