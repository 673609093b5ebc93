"""Runs the peer of ``load.py``: a Prefect server under the same requests, alone, with its own database (SQLite)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from api_process import free_port
from load_client import answer_of, answered, measured_rate, memory

PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


async def prefect_peer(python: str, requests: int, connections: int, settle_s: float) -> str:
    """Return the table of a Prefect server under the same requests, as many as it takes in some seconds."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **PREFECT, "PREFECT_HOME": folder}
        command = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        with (Path(folder) / "server.log").open("wb") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            reader, writer = await _opened_when_ready(port, server)
            version = (await _asked(reader, writer, "GET", "/api/admin/version")).decode()
            flow = json.loads(await _asked(reader, writer, "POST", "/api/flows/", {"name": "load"}))["id"]
            deployed = {"name": "load", "flow_id": flow}
            deployment = json.loads(await _asked(reader, writer, "POST", "/api/deployments/", deployed))["id"]
            await asyncio.sleep(settle_s)
            at_rest = sum(memory(server.pid).values())
            submit = _request("POST", f"/api/deployments/{deployment}/create_flow_run", {})
            rate = partial(measured_rate, port, connections=connections, may_be_busy=True)
            found = [await rate("submissions", [submit] * requests)]
            listed = _request("POST", "/api/flow_runs/filter", {"limit": 50, "sort": "EXPECTED_START_TIME_DESC"})
            writer.close()
            ids = [run["id"] for run in json.loads(await answered(port, listed))]
            reads = [_request("GET", f"/api/flow_runs/{ids[number % len(ids)]}") for number in range(2 * requests)]
            found.append(await rate("reads of a job", reads))
            found.append(await rate(f"lists of 50 among {requests:,}", [listed] * (requests // 2)))
            began = time.perf_counter()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
        stopped_s = time.perf_counter() - began
    head = f"Prefect {version}, its server alone: {at_rest:.0f} MiB at rest, stopped in {stopped_s:.2f} s\n\n"
    return (
        head
        + "| what | per second | p50 ms | p99 ms |\n|---|--:|--:|--:|\n"
        + "\n".join(one.row for one in found)
        + "\n"
    )


async def _opened_when_ready(
    port: int, server: subprocess.Popen[bytes]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(1200):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError):
            return await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        await asyncio.sleep(0.1)
    raise SystemExit("the peer did not start")


async def _asked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: object = None
) -> bytes:
    writer.write(_request(method, path, body))
    return await answer_of(reader)


def _request(method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
