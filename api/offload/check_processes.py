"""Runs checks of clients' input in processes with limits: their fork server, and one process at work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from service.jobs.host import wait_or_kill
from service.jobs.submission.confined import LENGTH
from service.jobs.submission.request import CheckLimits
from service.jobs.submission.server import LARGEST_MESSAGE, CheckCommand, CheckEnding

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ENVIRONMENT_PREFIX = "PYTHON"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Each thread of a library would take some of the limited address space."""


class CheckUnavailable(Exception):  # noqa: N818
    """A check failed, through no fault of the submission."""


@dataclass
class CheckServer:
    """A running fork server: its process, our end of its control socket, and its present checks."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    endings: dict[int, asyncio.Future[CheckEnding]] = field(default_factory=dict)
    listening: asyncio.Task[None] | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def start(cls) -> CheckServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "service.jobs.submission.server", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_environment(os.environ), **_ONE_THREAD},
                process_group=0,  # no terminal ends it; in the API's own session, its niceness counts
            )
        ours.setblocking(False)
        server = cls(process, ours)
        server.listening = asyncio.create_task(server._listen())
        return server

    def is_running(self) -> bool:
        """Return whether it still takes commands. A process that was killed closes its end of the socket first, and can
        be waited for a moment later.
        """
        return self.process.poll() is None and (self.listening is None or not self.listening.done())

    async def begin(self, limits: CheckLimits, longest_line: int, *, opens_files: bool) -> CheckProcess:
        """Start a process of these limits, which may read clients' files. Raises :class:`CheckUnavailable`."""
        number = next(self.numbers)
        ended = self.endings[number] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(_read_end)
        ours, theirs = socket.socketpair()
        with theirs:
            self.send(CheckCommand(number=number, limits=limits, opens_files=opens_files), theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=longest_line)
        return CheckProcess(self, number, reader, writer, ended, asyncio.get_running_loop().time())

    def send(self, command: CheckCommand, *connections: socket.socket) -> None:
        """Send a command. Raises :class:`CheckUnavailable` if the server has ended."""
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
        """End the server and its checks; kill it after ``within_s`` seconds. Blocks until it has ended."""
        self.control.close()
        wait_or_kill(self.process, within_s)


@dataclass
class CheckProcess:
    """A process that answers one request after another until its connection is closed or it reaches a limit."""

    server: CheckServer
    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: asyncio.Future[CheckEnding]
    began_at: float
    """When it started, by the event loop's clock."""
    served: int = 0
    """Number of requests that it has answered."""
    opened: str = ""
    """The id of the file that it read last."""
    ending: CheckEnding | None = None
    """How it ended, if it ended by itself."""

    async def answer(self, request: bytes, within_s: float) -> bytes | None:
        """Return the answer to a request; ``None`` if the process ended without one or took too many seconds.
        In these cases, and if the caller is cancelled, the process has ended when this returns. Raises
        ``RuntimeError`` for a failed check.
        """
        reply: dict[str, bytes] = {}
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._exchange(request, reply)
                    if "answer" not in reply:
                        self.ending = await asyncio.shield(self.ended)
        finally:
            if "answer" not in reply:
                self.opened = reply.get("opening", b"").decode()
                await self.kill()
        if "failed" in reply:
            raise RuntimeError(f"the check failed:\n{json.loads(reply['failed'])}")
        self.served += "answer" in reply
        return reply.get("answer")

    async def _exchange(self, request: bytes, reply: dict[str, bytes]) -> None:
        """Send a request, and note in ``reply`` the process's latest line of each word, up to its answer or its
        end.
        """
        with contextlib.suppress(ConnectionError):
            self.writer.write(LENGTH.pack(len(request)) + request)
            while "answer" not in reply and (line := await self.reader.readline()):
                word, _, content = line.rstrip(b"\n").partition(b" ")
                reply[word.decode()] = content

    async def end(self) -> None:
        """Let the process end, and wait until it has."""
        self.close()
        await asyncio.shield(self.ended)

    async def kill(self) -> None:
        """End the process at once, whatever it does."""
        self.close()
        if not self.ended.done():
            with contextlib.suppress(CheckUnavailable):
                self.server.send(CheckCommand(number=self.number, limits=None))
                await self.ended

    def close(self) -> None:
        """Tell the process that no further request comes."""
        self.writer.close()


def _read_end(ended: asyncio.Future[CheckEnding]) -> None:
    """Read a process's end; its error counts only while a check waits for it."""
    if not ended.cancelled():
        ended.exception()


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python needs to start, and none of the service's secrets."""
    return {name: value for name, value in ours.items() if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIX)}
