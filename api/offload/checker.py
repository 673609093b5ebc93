"""Checks submitted jobs and plans pipelines in processes with limits, so that a client's input takes none of the
API's own memory and threads.

An owner has one such process at a time, and all owners together have a bounded number at work; the others wait their
turn. A process that has read a file ends with its request. One that has read none waits a moment for the next request
of its owner, since a start takes longer than most checks. If such a process fails, a new one tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from api.deliveries import NamedAddresses
from api.offload.check_processes import CheckProcess, CheckServer, CheckUnavailable
from api.requests import ProblemError
from service.jobs.records import Problem, Rejected
from service.jobs.settings import Settings
from service.jobs.submission.confined import OUT_OF_MEMORY
from service.jobs.submission.request import AnyRequest, CheckLimits, CheckRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckerSettings:
    """Tunes how many checks wait, and for how long."""

    most_waiting: int = 256
    """Requests that wait for their turn; more are refused."""
    most_waiting_per_owner: int = 64
    clock_ratio: float = 10.0
    """A check may take this many times its processor time by the clock, since other work takes turns with it."""
    longest_line: int = 2**24
    """Most bytes of an answer."""
    keep_s: float = 5.0
    """Age in seconds up to which a process takes another request of its owner."""
    stop_s: float = 5.0
    """Seconds for the fork server to end."""


class Checker:
    """Checks requests one at a time per owner. Lives in one event loop, from :meth:`start` to :meth:`stop`."""

    def __init__(self, settings: Settings, tuning: CheckerSettings) -> None:
        self._settings = tuning
        self._addresses = NamedAddresses(settings)
        self._limits = CheckLimits(
            memory_bytes=round(settings.check_memory_gib * 2**30), processor_s=settings.check_seconds
        )
        self._room = asyncio.Semaphore(settings.max_checks)
        self._owners: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._most_kept = settings.max_checks
        self._kept: dict[str, CheckProcess] = {}
        self._server: CheckServer | None = None

    def start(self) -> None:
        """Begin to prepare the fork server; the first check waits for it."""
        self._running_server()

    async def stop(self) -> None:
        """End all checks."""
        for owner, process in list(self._kept.items()):
            self._let_go(owner, process)
        if self._server is not None:
            server, self._server = self._server, None
            if server.listening is not None:
                server.listening.cancel()
            await asyncio.to_thread(server.stop, self._settings.stop_s)

    async def problems(self, request: CheckRequest, owner: str) -> list[Problem]:
        """Return the reasons to refuse the jobs, up to a limit. Raises like :meth:`answer`."""
        found = [Problem(**problem) for problem in json.loads(await self.answer(request, owner))]
        return [*found, *await self._addresses.problems(request.specs)]

    async def answer(self, request: AnyRequest, owner: str) -> bytes:
        """Return the answer as JSON, once it is the owner's turn.

        Raises :class:`Rejected` if it would exceed the limits, :class:`CheckUnavailable`, and a 429 if too many
        requests wait.
        """
        async with self._turn(owner):
            return await self._answer_request(request, owner)

    @contextlib.asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        most, most_per_owner = self._settings.most_waiting, self._settings.most_waiting_per_owner
        if self._waiting.total() >= most or self._waiting[owner] >= most_per_owner:
            detail = f"{self._waiting[owner]} submissions of '{owner}' already wait to be checked; try again"
            raise ProblemError(429, detail, headers={"Retry-After": "2"})
        self._waiting[owner] += 1
        try:
            async with self._owners.setdefault(owner, asyncio.Lock()), self._room:
                yield
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._owners[owner]

    def _running_server(self) -> CheckServer:
        if self._server is None or not self._server.is_running():
            self._server = CheckServer.start()
        return self._server

    async def _answer_request(self, request: AnyRequest, owner: str) -> bytes:
        text = request.model_dump_json().encode()
        within_s = self._limits.processor_s * self._settings.clock_ratio
        kept = None if request.opens_files else self._kept.pop(owner, None)
        if kept is not None:
            with contextlib.suppress(CheckUnavailable):  # its server has ended, and it as well
                if (answer := await kept.answer(text, within_s)) is not None:
                    self._keep(owner, kept)
                    return answer
        longest, opens_files = self._settings.longest_line, request.opens_files
        process = await self._running_server().begin(self._limits, longest, opens_files=opens_files)
        answer = await process.answer(text, within_s)
        if answer is None:
            raise Rejected([_over_limit(request, process, self._limits, self._settings.clock_ratio)])
        if request.opens_files:
            await process.end()
        else:
            self._keep(owner, process)
        return answer

    def _keep(self, owner: str, process: CheckProcess) -> None:
        """Let a process wait for its owner's next request until it is :attr:`CheckerSettings.keep_s` old. If
        there are too many, the one that has waited longest ends.
        """
        loop, ends_at = asyncio.get_running_loop(), process.began_at + self._settings.keep_s
        if loop.time() >= ends_at:
            process.close()
            return
        if len(self._kept) >= self._most_kept:
            self._let_go(*next(iter(self._kept.items())))
        self._kept[owner] = process
        if process.served == 1:
            loop.call_at(ends_at, self._let_go, owner, process)

    def _let_go(self, owner: str, process: CheckProcess) -> None:
        if self._kept.get(owner) is process:
            del self._kept[owner]
            process.close()


def _over_limit(request: AnyRequest, process: CheckProcess, limits: CheckLimits, clock_ratio: float) -> Problem:
    """Return the refusal of a check that exceeded the limits; a process without an ``ending`` ran out of time."""
    file_id, ending = process.opened, process.ending
    memory, processor = f"{limits.memory_bytes / 2**30:g} GiB of memory", f"{limits.processor_s} s of processor time"
    if ending is None:
        reason = f"takes more than {limits.processor_s * clock_ratio:g} s ({clock_ratio:g} times TRIVET_CHECK_SECONDS)"
    elif ending.code == -signal.SIGXCPU:
        reason = f"takes more than {processor} (TRIVET_CHECK_SECONDS)"
    elif ending.code == OUT_OF_MEMORY:
        reason = f"needs more than {memory} (TRIVET_CHECK_MEMORY_GIB)"
    elif ending.code == -signal.SIGKILL:
        raise CheckUnavailable("a check was killed from outside")
    else:
        name = signal.Signals(-ending.code).name if ending.code < 0 else f"exit code {ending.code}"
        reason = f"ends its process ({name})"
    if ending is not None:
        reason += f"; it used {ending.processor_s:.1f} s and {ending.memory_bytes / 2**30:.2f} GiB"
    path = next((path for path, named_file in request.files() if named_file == file_id), "")
    message = f"{'reading it' if path else 'checking it'} {reason}"
    return Problem(path, message, file_id or None, f"a check within {memory} and {processor}")
