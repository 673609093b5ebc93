"""Measures a server for ``load.py``: requests over several connections, and the memory of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

CONNECTIONS = 16
BUSY_PAUSE_S = 0.1
_PARTS = {
    "fork-server": "fork server", "-server": "broker", "trivet up": "up", "-m workers": "worker", "-m api": "API"
}  # fmt: skip
"""Names of processes, by words of their command line."""


@dataclass(frozen=True)
class Rate:
    """Actions per second, and the milliseconds of one request."""

    what: str
    per_s: float
    p50_ms: float
    p99_ms: float

    @property
    def row(self) -> str:
        return f"| {self.what} | {self.per_s:,.0f} | {self.p50_ms:.1f} | {self.p99_ms:.1f} |"


@dataclass
class Api:
    """Calls the API with a key that may do everything."""

    port: int
    key: str

    def request(self, method: str, path: str, body: object = None, accept: str = "application/json") -> bytes:
        """Return the bytes of one request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


class BusyError(RuntimeError):
    """The server takes no requests for the moment (503)."""


async def measured_rate(
    port: int,
    what: str,
    requests: Sequence[bytes],
    each: int = 1,
    *,
    connections: int = CONNECTIONS,
    may_be_busy: bool = False,
) -> Rate:
    """Send all requests, over several connections; each does so many actions. If the server ``may_be_busy``, a
    request that it refuses for the moment, or hangs up on, is sent again after a pause, over a new connection,
    and counted.
    """
    waiting, took, refused = list(reversed(requests)), list[float](), list[bytes]()

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while waiting:
            began, request = time.perf_counter(), waiting.pop()
            while True:
                writer.write(request)
                try:
                    await answer_of(reader)
                    break
                except (BusyError, asyncio.IncompleteReadError, ConnectionError):
                    if not may_be_busy:
                        raise
                    refused.append(request)
                    writer.close()
                    await asyncio.sleep(BUSY_PAUSE_S)
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            took.append(time.perf_counter() - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(connections, len(requests)))))
    spent = time.perf_counter() - began
    took.sort()
    p99 = took[min(len(took) - 1, int(0.99 * len(took)))]
    what = f"{what} ({len(refused)} times refused or hung up on)" if refused else what
    found = Rate(what, each * len(requests) / spent, 1000 * statistics.median(took), 1000 * p99)
    print(found.row, file=sys.stderr, flush=True)
    return found


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """Read one answer and return its content. Raises ``RuntimeError`` for a refusal."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    content = await reader.readexactly(int(found[1]) if found else 0)
    if not head.startswith(b"HTTP/1.1 2"):
        refusal = BusyError if head.startswith(b"HTTP/1.1 503") else RuntimeError
        raise refusal((head + content[:500]).decode(errors="replace"))
    return content


async def answered(port: int, request: bytes) -> bytes:
    """Return the content of one answer, for which a server that is busy is asked again."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            writer.write(request)
            return await answer_of(reader)
        except (BusyError, asyncio.IncompleteReadError, ConnectionError):
            await asyncio.sleep(BUSY_PAUSE_S)
        finally:
            writer.close()


def memory(*pids: int) -> dict[str, float]:
    """Return the MiB of each part of these processes and all below them: its private memory, and its share of
    shared memory.
    """
    found: dict[str, float] = defaultdict(float)
    tops = [psutil.Process(pid) for pid in pids]
    for process in [each for top in tops for each in (top, *top.children(recursive=True))]:
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            name = next((name for word, name in _PARTS.items() if word in words), "others")
            found[name] += process.memory_full_info().pss / (1 << 20)
    return dict(found)
