"""The supervisor's end of the event socket: takes what ranks send, and notices when they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from service.jobs.events import ErrorEvent, Event
from workers import wire
from workers.lines import Line, LineSplitter
from workers.logs import LONGEST_LINE, RankLog, printable

_CHUNK = 1 << 16
_GREETING_WITHIN_S = 10.0
_LAST_WORDS_WITHIN_S = 1.0


@dataclass
class Rank:
    """What is known of a rank since it greeted. ``ended_at`` is on the monotonic clock."""

    number: int
    process: int | None
    """A pidfd: signals sent through it cannot hit a stranger that got the same pid. None once it is gone."""
    done: bool = False
    error: ErrorEvent | None = None
    hung_up: bool = False
    """Its events were read to the end."""
    ended_at: float | None = None


@dataclass
class Relay:
    """Serves one group. ``take`` gets every valid event; ``alarm`` is called when a rank raised or died unannounced."""

    address: Path
    logs: Path
    take: Callable[[Event], None]
    alarm: Callable[[], None]
    ranks: dict[int, Rank] = field(default_factory=dict)
    errors: list[ErrorEvent] = field(default_factory=list)
    """In order of arrival."""
    _logs: dict[int, RankLog] = field(default_factory=dict)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _stopping: bool = False
    _killed: bool = False

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self.address, backlog=1024)

    async def drain(self, within_s: float = 5.0) -> None:
        """Stop listening and read to the end what the ended ranks left behind."""
        if self._server is not None:
            self._server.close()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=within_s)
            for task in late:
                task.cancel()
        for number, log in self._logs.items():
            for text in log.close():
                self.take(wire.log_event(text, rank=number))
        for rank in self.ranks.values():
            self._forget(rank)

    def stop(self) -> bool:
        """Ask the ranks to stop (SIGTERM), also those that have yet to greet; whether there was any to ask."""
        self._stopping = True
        running = [rank for rank in self.ranks.values() if rank.ended_at is None]
        for rank in running:
            self._signal(rank, signal.SIGTERM)
        return bool(running)

    def kill(self) -> None:
        """SIGKILL the ranks, so that torchrun reports at once instead of waiting for them."""
        self._killed = True
        for rank in self.ranks.values():
            if rank.ended_at is None:
                self._signal(rank, signal.SIGKILL)

    def unannounced(self) -> list[Rank]:
        """Ranks that ended of themselves without a last word, in order of their end."""
        found = [rank for rank in self.ranks.values() if rank.ended_at and not rank.done and rank.error is None]
        return sorted(found, key=lambda rank: rank.ended_at or 0.0)

    @property
    def tails(self) -> dict[int, list[str]]:
        """The last lines that each rank printed."""
        return {number: list(log.tail) for number, log in self._logs.items()}

    def flush(self) -> None:
        """Bring what was printed into the files."""
        for log in self._logs.values():
            log.flush()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except wire.Malformed as error:
            self.take(wire.log_event(str(error)))
        except (ConnectionError, TimeoutError):
            pass  # a rank that dies hangs up as it likes; its process tells the rest
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_GREETING_WITHIN_S):
            greeting = wire.parse_greeting(await _first_line(reader))
        if greeting.channel == "events":
            self._meet(greeting.rank, _peer(writer))
            try:
                await self._read_events(reader, greeting.rank)
            finally:
                self.ranks[greeting.rank].hung_up = True
        else:
            await self._read_text(reader, greeting.rank, greeting.channel)

    def _meet(self, number: int, pid: int) -> None:
        if number in self.ranks:
            raise wire.Malformed(f"rank {number} greeted twice; the second connection is ignored")
        rank = self.ranks[number] = Rank(number, None)
        try:
            rank.process = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(rank)
            return
        asyncio.get_running_loop().add_reader(rank.process, self._ended, rank)
        if self._stopping:
            self._signal(rank, signal.SIGTERM)

    def _ended(self, rank: Rank) -> None:
        self._forget(rank)
        if not self._killed:
            rank.ended_at = time.monotonic()
            self._hear_out(rank, rank.ended_at + _LAST_WORDS_WITHIN_S)

    def _hear_out(self, rank: Rank, until: float) -> None:
        """Its last words may still be in the socket: read them before calling its end a surprise."""
        if rank.done or rank.error is not None:
            return
        if rank.hung_up or time.monotonic() > until:
            self.alarm()
        else:
            asyncio.get_running_loop().call_later(0.01, self._hear_out, rank, until)

    def _forget(self, rank: Rank) -> None:
        if rank.process is not None:
            asyncio.get_running_loop().remove_reader(rank.process)
            os.close(rank.process)
            rank.process = None

    def _signal(self, rank: Rank, number: signal.Signals) -> None:
        if rank.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.process, number)

    async def _read_events(self, reader: asyncio.StreamReader, rank: int) -> None:
        splitter = LineSplitter(wire.LONGEST_EVENT)
        while chunk := await reader.read(_CHUNK):
            for line in splitter.feed(chunk):
                self._event(line, rank)
        for line in splitter.finish():
            self._event(line, rank)

    def _event(self, line: Line, rank: int) -> None:
        try:
            event = wire.parse_event(line, rank)
        except wire.Malformed as error:
            self.take(wire.log_event(str(error), rank=rank))
            return
        if isinstance(event, wire.Done):
            self.ranks[rank].done = True
        elif event["type"] == "error":
            self._error(cast(ErrorEvent, event), rank)
        else:
            self.take(event)

    def _error(self, event: ErrorEvent, rank: int) -> None:
        self.errors.append(event)
        self.ranks[rank].error = event
        self.take(event)
        self.alarm()

    async def _read_text(self, reader: asyncio.StreamReader, rank: int, stream: Literal["stdout", "stderr"]) -> None:
        log = self._logs.setdefault(rank, RankLog(self.logs / f"rank-{rank}.log"))
        splitter = LineSplitter(LONGEST_LINE)
        while chunk := await reader.read(_CHUNK):
            for line in splitter.feed(chunk):
                self._print(log, line, rank, stream)
        for line in splitter.finish():
            self._print(log, line, rank, stream)

    def _print(self, log: RankLog, line: Line, rank: int, stream: Literal["stdout", "stderr"]) -> None:
        for text in log.add(printable(line)):
            self.take(wire.log_event(text, stream, rank))


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    text = bytearray()
    while not text.endswith(b"\n"):
        byte = await reader.read(1)
        if not byte or len(text) > wire.LONGEST_GREETING:
            raise wire.Malformed(f"a connection without a greeting: {bytes(text[:80])!r}")
        text += byte
    return bytes(text)


def _peer(writer: asyncio.StreamWriter) -> int:
    """The pid at the other end, as the kernel knows it."""
    connection = writer.get_extra_info("socket")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
