"""Checks of submitted jobs and plans of pipelines, in processes with limits: what a client sends takes none of the
API's own memory and threads.

An owner has one such process at a time, and all owners together a bounded number; the others wait their turn. A
process ends with the request that it works for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from api.problems import ProblemError
from api.webhook_address import NamedAddresses
from service.jobs.records import Problem, Rejected
from service.jobs.settings import Settings
from service.jobs.submission.confined import LENGTH, OUT_OF_MEMORY
from service.jobs.submission.request import AnyRequest, CheckLimits, CheckRequest
from service.jobs.submission.server import LARGEST_MESSAGE, CheckCommand, CheckEnding

Result = TypeVar("Result")
log = logging.getLogger(__name__)

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ENVIRONMENT_PREFIX = "PYTHON"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Each thread of a library would take address space, which is limited."""


@dataclass(frozen=True)
class CheckerSettings:
    """Tunes how many checks wait, and for how long."""

    most_waiting: int = 256
    """Requests that wait for their turn; more are refused."""
    most_waiting_per_owner: int = 64
    clock_ratio: float = 10.0
    """A check may take this many times its processor time by the clock, as other work takes turns with it."""
    longest_line: int = 2**24
    """Bytes of an answer."""
    stop_s: float = 5.0
    """Seconds that the fork server gets to end."""


class CheckUnavailable(Exception):  # noqa: N818
    """A check could not be made, through no fault of what was to be checked."""


@dataclass
class _CheckServer:
    """A running fork server: its process, our end of its control socket, and the checks that it has in hand."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    endings: dict[int, asyncio.Future[CheckEnding]] = field(default_factory=dict)
    listening: asyncio.Task[None] | None = None

    @classmethod
    def start(cls) -> _CheckServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "service.jobs.submission.server", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_environment(os.environ), **_ONE_THREAD},
                start_new_session=True,
            )
        ours.setblocking(False)
        server = cls(process, ours)
        server.listening = asyncio.create_task(server._listen())
        return server

    def send(self, command: CheckCommand, *connections: socket.socket) -> None:
        """Send a command. Raises :class:`CheckUnavailable` where the server is gone."""
        try:
            message = command.model_dump_json().encode()
            socket.send_fds(self.control, [message], [connection.fileno() for connection in connections])
        except OSError as error:
            raise CheckUnavailable(f"the check server does not answer: {error}") from error

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while message := await loop.sock_recv(self.control, LARGEST_MESSAGE):
                ending = CheckEnding.model_validate_json(message)
                if (waiting := self.endings.pop(ending.number, None)) is not None and not waiting.done():
                    waiting.set_result(ending)
        for waiting in self.endings.values():
            if not waiting.done():
                waiting.set_exception(CheckUnavailable("the check server ended"))

    def stop(self, within_s: float) -> None:
        """End the server, and with it its checks; kill it after ``within_s`` seconds. Blocks until it is gone."""
        self.control.close()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Checker:
    """Checks requests one at a time per owner. Lives in one event loop, from :meth:`start` to :meth:`stop`."""

    def __init__(self, settings: Settings, tuning: CheckerSettings) -> None:
        self._settings = tuning
        self._addresses = NamedAddresses(settings)
        self._limits = CheckLimits(
            memory_bytes=round(settings.check_memory_gib * 2**30),
            processor_s=settings.check_seconds,
        )
        self._room = asyncio.Semaphore(settings.max_checks)
        self._owners: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._server: _CheckServer | None = None

    def start(self) -> None:
        """Begin to prepare the fork server; the first check waits for it."""
        self._running_server()

    async def stop(self) -> None:
        """End all checks."""
        if self._server is not None:
            server, self._server = self._server, None
            if server.listening is not None:
                server.listening.cancel()
            await asyncio.to_thread(server.stop, self._settings.stop_s)

    async def problems(self, request: CheckRequest, owner: str) -> list[Problem]:
        """Return every reason to refuse the jobs, up to a number of them. Raises as :meth:`answer` does."""
        found = [Problem(**problem) for problem in json.loads(await self.answer(request, owner))]
        return [*found, *await self._addresses.problems(request.specs)]

    async def answer(self, request: AnyRequest, owner: str) -> bytes:
        """Return the answer as JSON, once it is the owner's turn.

        Raises :class:`Rejected` where it would take more than the limits, :class:`CheckUnavailable`, and a 429 where
        too many requests wait.
        """
        async with self._turn(owner):
            return await self._answered(request)

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

    def _running_server(self) -> _CheckServer:
        if self._server is None or self._server.process.poll() is not None:
            self._server = _CheckServer.start()
        return self._server

    async def _answered(self, request: AnyRequest) -> bytes:
        server, number = self._running_server(), next(self._numbers)
        ended = server.endings[number] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            server.send(CheckCommand(number=number, limits=self._limits), theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=self._settings.longest_line)
        reply: dict[str, bytes] = {}
        ending: CheckEnding | None = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.processor_s * self._settings.clock_ratio):
                    await _exchange(reader, writer, request.model_dump_json().encode(), reply)
                    ending = await asyncio.shield(ended)
        finally:
            writer.close()
            if not ended.done():
                with contextlib.suppress(CheckUnavailable):
                    server.send(CheckCommand(number=number, limits=None))
                    await ended
        if "answer" in reply:
            return reply["answer"]
        if "failed" in reply:
            raise RuntimeError(f"the check failed:\n{json.loads(reply['failed'])}")
        raise Rejected(
            [_over_limit(request, reply.get("opening", b"").decode(), ending, self._limits, self._settings.clock_ratio)]
        )


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``, which is cancelled when the client closes its connection.

    The request's body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ProblemError(400, "the client closed its connection before the answer")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, reply: dict[str, bytes]
) -> None:
    """Send the request and note in ``reply`` what the process answers until its end: the latest line of each word."""
    with contextlib.suppress(ConnectionError):
        writer.write(LENGTH.pack(len(request)) + request)
        while line := await reader.readline():
            word, _, content = line.rstrip(b"\n").partition(b" ")
            reply[word.decode()] = content


def _over_limit(
    request: AnyRequest, file_id: str, ending: CheckEnding | None, limits: CheckLimits, clock_ratio: float
) -> Problem:
    """Return the refusal of what takes more than the limits; ``ending`` is ``None`` where the clock ended it."""
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
    return Problem(path, message, file_id or None, f"what is checked within {memory} and {processor}")


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return only what Python needs to start, and none of the service's secrets."""
    return {name: value for name, value in ours.items() if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIX)}
