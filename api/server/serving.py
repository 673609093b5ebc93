"""Runs the API's server, with time limits for clients and a private socket for its own user's commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.jobs.host import PrivateSocket

LONGEST_HEAD = 64 << 10
"""Most bytes of a request before its body."""
LEAST_BODY = 10_000
"""Bytes of a body that a client must send in each interval of the limit on bodies."""
LEAST_READ = 10_000
"""Bytes of a waiting answer that a client must take in each interval of the limit on reading."""
_TICK_S = 1.0

_KEEP_PATH: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""The socket's path is removed by its owner, which may be another process."""


class _LimitedProtocol(HttpToolsProtocol):
    """HTTP for clients that may be slow on purpose: a request's head must be complete in time and of bounded size, and
    its body must keep coming. While the application does not read, the client owes nothing. The client must
    also read its answer, or the connection is cut, whatever is left.
    """

    head_s: ClassVar[float]
    body_s: ClassVar[float]
    read_s: ClassVar[float]
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _in_head = False
    _in_body = False
    _head_bytes = 0
    _body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        self._await(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_waiting_for_reader()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        ends_a_body = self._in_body
        super().data_received(data)
        if self._in_head and not ends_a_body:
            self._head_bytes += len(data)
            if self._head_bytes > LONGEST_HEAD and not self.transport.is_closing():
                self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._await(self.head_s)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._body_bytes = False, True, 0
        super().on_headers_complete()
        self._await(self.body_s)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_waiting()
        self._in_body = False
        super().on_message_complete()

    def _await(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._in_body and self._body_bytes >= LEAST_BODY):
            self._body_bytes = 0
            self._await(self.body_s if self._in_body else self.head_s)
        elif self._in_body:
            self.transport.abort()
        elif self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._refuse(408, "Request Timeout")
        else:
            self.transport.close()

    def _await_reader(self) -> None:
        self._stop_waiting_for_reader()
        left = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.read_s, self._unread, left)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _unread(self, before: int) -> None:
        """Cut the connection unless the client has read enough; nothing is added while writing is paused."""
        self._unread_timer = None
        if before - self.transport.get_write_buffer_size() >= LEAST_READ:
            self._await_reader()
        else:
            self._cut()

    def _cut(self) -> None:
        """End the connection, and drop the bytes that the kernel holds for it."""
        if (connection := self.transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, status: int, phrase: str) -> None:
        self._stop_waiting()
        self.transport.write(f"HTTP/1.1 {status} {phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        self.transport.close()


def limited(head_s: float, body_s: float, read_s: float) -> type[_LimitedProtocol]:
    """Return the protocol with these limits, in seconds."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"head_s": head_s, "body_s": body_s, "read_s": read_s})


class ApiServer(uvicorn.Server):
    """A server that also answers on a private socket, without TLS, and writes a byte to ``ready`` once it answers."""

    def __init__(self, config: uvicorn.Config, private: PrivateSocket | None = None, ready: int | None = None) -> None:
        super().__init__(config)
        self._private = private
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait for the end, and set the time in answers each second; the base class looks ten times a second."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._woken.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.end()

    def end(self) -> None:
        """Let the server end; safe to call in any thread and in a handler of signals."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._private is not None and self.started:
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_unix_server(self._protocol, sock=self._private.bound, **_KEEP_PATH))
        if self._ready is not None and self.started:
            os.write(self._ready, b"1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, private socket included; the base class then lets the signal that ended it end the process."""
        await super().shutdown(sockets)
        if self._private is not None:
            self._private.close()

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as in the base class
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made
