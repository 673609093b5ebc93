"""Runs an API in a process of its own on a free port, for measurements and tests; it may be stopped and started
again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.store import Store, StoreLimits

LIMIT_S = 300
"""How long an API may take until it is ready: many times what it takes."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class ApiProcess:
    """``settings`` are the service's environment variables; none of this process's own reach it."""

    settings: Mapping[str, str]
    log: Path
    """The process's output is appended here."""
    program: Sequence[str] = ("api",)
    """The module that Python runs, and its arguments before the port."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and return when it is ready. :raises RuntimeError: with its log, if it ends instead or takes
        longer than ``LIMIT_S``.
        """
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        command = [sys.executable, "-m", *self.program, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env={**outer, **self.settings}, stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the API did not start:\n{self.log.read_text()}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
            return True
        return False

    def stop(self) -> None:
        """Stop it, if it runs, and wait for its end."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


@contextlib.contextmanager
def api_with_broker(
    settings: Mapping[str, str] = MappingProxyType({}), limits: StoreLimits | None = None
) -> Iterator[tuple[Store, DataLayout, ApiProcess]]:
    """Yield a store over a broker of its own, and an API of both that is still to be started; end all of them."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker.start(Path(folder) / "broker") as broker:
        layout = DataLayout(Path(folder) / "data")
        store = Store.connect(broker.url, layout, limits)
        own = {"TRIVET_DATA": str(layout.root), "TRIVET_REDIS_URL": broker.url, **settings}
        api = ApiProcess(own, Path(folder) / "api.log")
        try:
            yield store, layout, api
        finally:
            api.stop()
            store.close()
