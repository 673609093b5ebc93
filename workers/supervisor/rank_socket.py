"""Serves the group's socket: reads the ranks' output and last words, and notices when they die."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from service.jobs.events import ErrorEvent, Event, MalformedEvent
from service.jobs.settings import MAX_LOG_BYTES
from service.linux import stat_of, weigh_session
from workers import event_protocol
from workers.event_protocol import STOP, Greeting, LineSplitter, TextLine, end_early, lease_until
from workers.rank.stacks import REQUEST, answers
from workers.supervisor.keeper import descendants
from workers.supervisor.logs import LONGEST_LINE, RankLog, RotatedLog, printable
from workers.supervisor.settings import SupervisorSettings


@dataclass
class Admission:
    """Admits the processes of one group on this host, each for one rank."""

    secret: str
    """The group's secret; the ranks find it in their environment."""
    ranks: range
    """The ranks that run on this host."""
    root: int
    """The pid of the supervisor, below which all processes of its group are."""
    _speakers: dict[int, int] = field(default_factory=dict)

    def check(self, greeting: Greeting, pid: int) -> None:
        """Raise :class:`MalformedEvent` unless process ``pid``, which the kernel names, may speak for the rank.

        A process that has already ended cannot be examined: its secret is then enough.
        """
        who = f"process {pid}, which calls itself rank {greeting.rank},"
        if not hmac.compare_digest(greeting.secret.encode(), self.secret.encode()):
            raise MalformedEvent(f"{who} does not know the secret of this group; it is ignored")
        if greeting.rank not in self.ranks:
            here = f"{self.ranks.start} to {self.ranks.stop - 1}"
            raise MalformedEvent(f"{who} is ignored: the ranks of this host are {here}")
        if not is_descendant(pid, self.root):
            raise MalformedEvent(f"{who} was not started by this group's supervisor; it is ignored")
        if self._speakers.setdefault(greeting.rank, pid) != pid:
            raise MalformedEvent(f"{who} is ignored: that rank is process {self._speakers[greeting.rank]}")


def is_descendant(pid: int, root: int) -> bool:
    """Return whether ``root`` is an ancestor of ``pid``; true if that process has ended meanwhile."""
    while pid > 1:
        try:
            pid = int(stat_of(pid)[1])
        except (FileNotFoundError, ProcessLookupError):
            return True
        if pid == root:
            return True
    return False


_CHUNK = 1 << 16
_MOST_COMPLAINTS = 100
_WEIGH_AGAIN_S = 0.15


@dataclass
class Rank:
    """Holds the facts about a rank since it greeted; times are in Unix seconds."""

    number: int
    requests: socket.socket
    """Its control connection, in the other direction: the supervisor's requests."""
    pid: int = 0
    process: int | None = None
    """A pidfd: signals through it cannot hit another process that got the same pid. None once the rank has ended."""
    done: bool = False
    error: ErrorEvent | None = None
    terminated_at: float | None = None
    """When SIGTERM arrived there; its supervisor never sends it."""
    hung_up: bool = False
    """Whether all of its output has been read."""
    ended_at: float | None = None
    """When its end was noticed, before the first kill from here; the end itself came earlier."""

    @property
    def has_explained_itself(self) -> bool:
        return self.done or self.error is not None or self.terminated_at is not None

    def ask(self, request: bytes) -> None:
        """Send a line, unless the rank has ended, or reads so slowly that there is no room."""
        with contextlib.suppress(OSError):
            self.requests.send(request, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


@dataclass
class RankSocket:
    """Serves one group. ``say`` gets its own messages as events; ``alarm`` is called when a rank fails."""

    address: Path
    logs: Path
    say: Callable[[Event], None]
    """Records an event and relays it."""
    offer: Callable[[Event], None]
    """Relays a printed line, which is also in its own file."""
    alarm: Callable[[], None]
    admission: Admission
    settings: SupervisorSettings
    most_log_bytes: int = MAX_LOG_BYTES
    """The most bytes kept of one rank's output in this attempt."""
    ranks: dict[int, Rank] = field(default_factory=dict)
    errors: list[ErrorEvent] = field(default_factory=list)
    """Errors in order of arrival."""
    _logs: dict[int, RankLog] = field(default_factory=dict)
    _complaints: Counter[int] = field(default_factory=Counter)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _stopping: bool = False
    _ends_early: str | None = None
    _killed: bool = False
    _until: float | None = None
    heard_at: float = field(default_factory=time.monotonic)
    """Time of the last message from any rank, on the monotonic clock."""

    def expect(self, ranks: Iterable[int]) -> list[RotatedLog]:
        """Return the files for the output of these ranks, to be made before the ranks start."""
        return [self._log(rank).file for rank in ranks]

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self.address, backlog=1024)

    async def drain(self) -> None:
        """Stop listening, and read to the end what ended ranks left behind."""
        if self._server is not None:
            await asyncio.sleep(
                self.settings.socket_pause_s
            )  # admits ranks that connected while this process was not running
            self._server.close()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=self.settings.drain_within_s)
            for task in late:
                task.cancel()
        for log in self._logs.values():
            for notice in log.close():
                self.offer(notice)
        for rank in self.ranks.values():
            self._forget(rank)
            rank.requests.close()

    def extend(self, until: float) -> None:
        """Let the ranks live until the :func:`service.linux.uptime` ``until``. Safe to call in any thread."""
        self._until = until
        for rank in list(self.ranks.values()):
            rank.ask(lease_until(until))

    def stop(self) -> bool:
        """Ask the ranks to stop, including those that have yet to greet; return whether there was any to ask."""
        self._stopping = True
        running = [rank for rank in self.ranks.values() if rank.ended_at is None]
        for rank in running:
            rank.ask(STOP)
        return bool(running)

    def end_early(self, reason: str) -> None:
        """Ask the ranks to end the job as a success now, including those that have yet to greet. May be repeated."""
        if self._ends_early is None:
            self._ends_early = reason
            for rank in self.ranks.values():
                rank.ask(end_early(reason))

    @property
    def running(self) -> list[int]:
        """Return the ranks that have greeted and not ended."""
        return sorted(rank.number for rank in self.ranks.values() if rank.process is not None)

    def ask_for_stacks(self) -> None:
        """Have the ranks write their stacks (:mod:`workers.rank.stacks`)."""
        for rank in self.ranks.values():
            if rank.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.process, REQUEST)

    def forked_by(self, number: int) -> list[int]:
        """Return the processes of a rank that write stacks on request, as it does."""
        pid = self.ranks[number].pid
        return [each for each in sorted(descendants(pid)) if answers(each)] if pid else []

    def ask_fork_for_stacks(self, number: int, pid: int) -> None:
        """Have a process of a rank write its stacks behind those of the rank."""
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if answers(pid) and is_descendant(pid, self.ranks[number].pid):  # so it is still that one
                    signal.pidfd_send_signal(handle, REQUEST)
            finally:
                os.close(handle)

    def kill(self) -> None:
        """Send SIGKILL to the ranks, so that torchrun reports at once instead of waiting for them."""
        self._killed = True
        for rank in self.ranks.values():
            if rank.ended_at is None and rank.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.process, signal.SIGKILL)

    @property
    def silent(self) -> dict[int, float]:
        """Return the ranks that ended by themselves without a last word, and when that was noticed."""
        ended = {rank.number: rank.ended_at for rank in self.ranks.values() if not rank.has_explained_itself}
        return {number: at for number, at in ended.items() if at is not None}

    @property
    def terminated(self) -> dict[int, float]:
        """Return the ranks that SIGTERM ended, and when it arrived there."""
        found = {rank.number: rank.terminated_at for rank in self.ranks.values()}
        return {number: at for number, at in found.items() if at is not None}

    @property
    def tails(self) -> dict[int, list[str]]:
        """Return the last lines that each rank printed."""
        return {number: list(log.tail) for number, log in self._logs.items()}

    @property
    def files(self) -> list[RotatedLog]:
        """Return the files into which the ranks' output goes."""
        return [log.file for log in self._logs.values()]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except MalformedEvent as error:
            self.say(event_protocol.log_event(str(error)))
        except (ConnectionError, TimeoutError):
            pass  # a dying rank may hang up in any way; its process tells the rest
        except asyncio.CancelledError:
            pass  # by drain(): asyncio would log it as an error
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self.settings.greeting_within_s):
            greeting = event_protocol.parse_greeting(await _first_line(reader))
        self.admission.check(greeting, _peer(writer.get_extra_info("socket")))
        if greeting.channel == "control":
            self._meet(greeting.rank, writer.get_extra_info("socket"))
            try:
                await self._read_last_words(reader, greeting.rank)
            finally:
                self.ranks[greeting.rank].hung_up = True
        else:
            await self._read_text(reader, greeting.rank, greeting.channel)

    def _meet(self, number: int, connection: socket.socket) -> None:
        if number in self.ranks:
            raise MalformedEvent("this rank greeted twice; the second connection is ignored", str(number).encode())
        rank = self.ranks[number] = Rank(number, connection.dup(), _peer(connection))
        try:
            rank.process = os.pidfd_open(rank.pid)
        except ProcessLookupError:
            self._note_end(rank)
            return
        asyncio.get_running_loop().add_reader(rank.process, self._note_end, rank)
        if self._until is not None:
            rank.ask(lease_until(self._until))
        if self._ends_early is not None:
            rank.ask(end_early(self._ends_early))
        if self._stopping:
            rank.ask(STOP)
        self._weigh(rank)

    def _weigh(self, rank: Rank) -> None:
        """Let the niceness of a rank, which leads a session of its own, count beside the other sessions of the host."""
        if rank.process is not None and not weigh_session(rank.pid):
            asyncio.get_running_loop().call_later(_WEIGH_AGAIN_S, self._weigh, rank)

    def _note_end(self, rank: Rank) -> None:
        self._forget(rank)
        if not self._killed:
            rank.ended_at = time.time()
            self._hear_out(rank, time.monotonic() + self.settings.last_words_within_s)

    def _hear_out(self, rank: Rank, until: float) -> None:
        """Read a rank's last words, which may still be in the socket, before counting its end as silent."""
        if rank.has_explained_itself:
            return
        if rank.hung_up or time.monotonic() > until:
            self.alarm()
        else:
            asyncio.get_running_loop().call_later(self.settings.socket_pause_s, self._hear_out, rank, until)

    def _forget(self, rank: Rank) -> None:
        if rank.process is not None:
            asyncio.get_running_loop().remove_reader(rank.process)
            os.close(rank.process)
            rank.process = None

    async def _read_last_words(self, reader: asyncio.StreamReader, rank: int) -> None:
        splitter = LineSplitter(event_protocol.LONGEST_WORD)
        while chunk := await reader.read(_CHUNK):
            for line in splitter.feed(chunk):
                self._hear(line, rank)

    def _hear(self, line: TextLine, rank: int) -> None:
        try:
            word = event_protocol.parse_last_word(line, rank)
        except MalformedEvent as error:
            self.complain(error, rank)
            return
        if isinstance(word, event_protocol.Done):
            self.ranks[rank].done = True
        elif isinstance(word, event_protocol.Terminated):
            self.ranks[rank].terminated_at = word.time
            self.alarm()
        else:
            self._error(word, rank)

    def complain(self, error: MalformedEvent, rank: int) -> None:
        """Tell, in the job's log, what a rank said or wrote that nobody understands, up to a number of times: it takes
        more bytes to tell than to say.
        """
        self._complaints[rank] += 1
        if self._complaints[rank] <= _MOST_COMPLAINTS:
            self.say(event_protocol.log_event(str(error), rank=rank))
        if self._complaints[rank] == _MOST_COMPLAINTS:
            self.say(event_protocol.log_event("no more malformed reports of this rank are told", rank=rank))

    def _error(self, event: ErrorEvent, rank: int) -> None:
        """Take a rank's error; only the first one ended it."""
        if self.ranks[rank].error is not None:
            return
        self.errors.append(event)
        self.ranks[rank].error = event
        self.say(event)
        self.alarm()

    async def _read_text(self, reader: asyncio.StreamReader, rank: int, stream: Literal["stdout", "stderr"]) -> None:
        self.heard_at = time.monotonic()
        log = self._log(rank)
        splitter = LineSplitter(LONGEST_LINE)
        while chunk := await reader.read(_CHUNK):
            self.heard_at = time.monotonic()
            for line in splitter.feed(chunk):
                self._print(log, line, stream)
            while log.file.pending > self.settings.most_unwritten_bytes:  # a disk that hangs: the rank waits for it too
                await asyncio.sleep(self.settings.socket_pause_s)
        for line in splitter.finish():
            self._print(log, line, stream)

    def _log(self, rank: int) -> RankLog:
        if rank not in self._logs:
            self._logs[rank] = RankLog(self.logs, rank, most_bytes=self.most_log_bytes)
        return self._logs[rank]

    def _print(self, log: RankLog, line: TextLine, stream: Literal["stdout", "stderr"]) -> None:
        for event in log.add(printable(line), stream):
            self.offer(event)


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    text = bytearray()
    while not text.endswith(b"\n"):
        byte = await reader.read(1)
        if not byte or len(text) > event_protocol.LONGEST_GREETING:
            raise MalformedEvent("a connection without a greeting")
        text += byte
    return bytes(text)


def _peer(connection: socket.socket) -> int:
    """Return the pid at the other end, as the kernel knows it."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
