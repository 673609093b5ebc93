"""``python -m api`` as a process of a test's own, and where it serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import eventually

API = ("-m", "api")


@contextmanager
def process(
    broker: str, data: Path, *arguments: str, program: tuple[str, ...] = API, wait_s: str = "10"
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    environment = {**os.environ, "TRIVET_DATA": str(data), "TRIVET_REDIS_URL": broker, "TRIVET_PORT": "0"}
    environment["TRIVET_BROKER_WAIT_S"] = wait_s
    log = data.with_suffix(".log")
    with log.open("w") as output:
        started = subprocess.Popen(
            [sys.executable, *program, *arguments], env=environment, stdout=output, stderr=output, text=True
        )
    try:
        yield started, log
    finally:
        started.kill()
        started.wait()


def address(log: Path) -> str:
    found: list[str] = []

    def ready() -> bool:
        found[:] = re.findall(r"serving (https?://\S+)", log.read_text())
        return bool(found) and "startup complete" in log.read_text()

    eventually(ready)
    return found[0]
