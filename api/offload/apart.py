"""Runs a second process of the API for answers that take long to make, and passes requests on to it.

One that encodes a thousand jobs holds Python's lock meanwhile, in any thread. There it delays no other request. The
process is started by the first request that it could answer, which is answered here, as is any other while it is not
ready. It ends with this one, and when no such request has come for a while: an idle service needs no memory for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
from starlette.types import Receive, Scope, Send

from api.offload.leaving import disconnected
from service.jobs.text import log_field
from service.jobs.tracing import current_traceparent

log = logging.getLogger(__name__)

PROGRAM = "api.apart_server"
READY = b"1"
IDLE_S = 180.0
"""The seconds without a request after which the process ends."""
_PAUSE_S = 5.0
_ENDS_WITHIN_S = 5.0
_OURS = frozenset(
    {b"connection", b"content-length", b"transfer-encoding", b"expect", b"forwarded", b"traceparent", b"x-request-id"}
)
_OF_ONE_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"})


class NotReady(Exception):  # noqa: N818
    """No process takes the request; nothing was sent."""


class Apart:
    """Lives in one event loop. Nothing is started before :meth:`forward` is called, and nothing after :meth:`stop`."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s, self._open, self._asked_at = idle_s, 0, 0.0
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would tell each request that is passed on
        self._client: httpx2.AsyncClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def forward(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Have a request answered there, and pass the answer on. ``receive`` is what comes behind the body: a client
        that leaves. Raises :class:`NotReady` before anything is sent, and ``httpx2.HTTPError`` if the answer does not
        come or breaks off.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if self._client is None:
            raise NotReady
        self._open += 1
        try:
            await self._ask(self._client, scope, receive, send, body)
        finally:
            self._open -= 1
            self._asked_at = time.monotonic()

    @staticmethod
    async def _ask(client: httpx2.AsyncClient, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        url = httpx2.URL(scheme="http", host="api", raw_path=_target(scope))
        request = client.build_request(scope["method"], url, headers=list(_headers(scope)), content=body)
        asking = asyncio.create_task(client.send(request, stream=True))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            # What is checked for a client ends with it. A read goes on there, and so its turn lasts here.
            await asyncio.wait(
                {asking} if scope["method"] == "GET" else {asking, leaving}, return_when="FIRST_COMPLETED"
            )
            if asking.done():
                await _pass_on(asking.result(), send, leaving)
        except httpx2.ConnectError as error:
            raise NotReady from error
        finally:
            leaving.cancel()
            await _close_request(asking)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Keep a process while it is needed, and start another after a moment if it ends by itself. If none can be
        started, the next request after a moment tries again.
        """
        try:
            while await self._keep_process():
                await asyncio.sleep(_PAUSE_S)
        except Exception:  # no memory, no thread, no room for a socket
            log.exception("the process for expensive answers cannot be started; requests are answered without it")
            await asyncio.sleep(_PAUSE_S)
        self._task = None

    async def _keep_process(self) -> bool:
        """Start a process; return True once it has ended, False once it was not needed any more and was ended."""
        with tempfile.TemporaryDirectory(prefix="trivet-api-") as folder:
            path = Path(folder) / "socket"
            process = await _start_process(path)
            try:
                assert process.stdout is not None
                if await process.stdout.read(len(READY)) == READY:
                    transport = httpx2.AsyncHTTPTransport(uds=str(path), limits=_CONNECTIONS)
                    async with httpx2.AsyncClient(transport=transport, timeout=None) as self._client:
                        log.info("process %s makes expensive answers", process.pid)
                        if await self._outlasts_need(process):
                            return False
            finally:
                self._client = None
                await _end_process(process)
        log.warning("the process for expensive answers ended with %s; starting another", process.returncode)
        return True

    async def _outlasts_need(self, process: Process) -> bool:
        """Return True once nobody has asked for the time that it may be idle, False once the process has ended."""
        self._asked_at = time.monotonic()
        while (left := self._idle_s if self._open else self._asked_at + self._idle_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await process.wait()
            except TimeoutError:
                continue
            return False
        return True


_CONNECTIONS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


async def _start_process(path: Path) -> Process:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        command = (sys.executable, "-P", "-m", PROGRAM, str(listening.fileno()))
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, pass_fds=(listening.fileno(),), env=_environment(os.environ)
        )


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which that process finds the modules of this one."""
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def _end_process(process: Process) -> None:
    """End a process: it ends with its input, and at once when that takes too long."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_ENDS_WITHIN_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _target(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def _headers(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    """Yield a request's headers, and those that tell the other process what this one knows of it."""
    for name, value in scope["headers"]:
        if name not in _OURS and not name.startswith(b"x-forwarded-"):
            yield name, value
    yield b"x-forwarded-proto", scope["scheme"].encode()
    if scope["client"] is not None:
        yield b"x-forwarded-for", scope["client"][0].encode()
    if (name := log_field("request_id")) is not None:
        yield b"x-request-id", name.encode()
    if (traceparent := current_traceparent()) is not None:
        yield b"traceparent", traceparent.encode()


async def _pass_on(answer: httpx2.Response, send: Send, leaving: asyncio.Task[None]) -> None:
    """Send an answer piece by piece, until its end or until the client has left."""
    headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in _OF_ONE_CONNECTION]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    async for piece in answer.aiter_raw():
        if leaving.done():
            return
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _close_request(asking: asyncio.Task[httpx2.Response]) -> None:
    """End a request that was passed on, answered or not."""
    asking.cancel()
    (answer,) = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(answer, httpx2.Response):
        await answer.aclose()
