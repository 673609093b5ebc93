"""A Ray cluster on this machine alone: a head without CPUs and two nodes of four each; it asks for its own token.

    python tests/helpers/ray_cluster.py FOLDER

starts it, writes its address and token to ``FOLDER/cluster.json``, and starts head and nodes again when they end, as a
service manager does, until SIGTERM. Paths of sockets lie in the folder, so its name must be short.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
from ports import free_port
from waiting import LIMIT_S, eventually

from workers.launchers import LauncherContext, LauncherUnavailable
from workers.launchers.ray import Ray

_LOOK_S = 0.5
_REGISTERED_S = 60.0
_ALL = "3 nodes, 8 CPUs, 0 GPUs"


class RayCluster:
    """Starts and ends it; all its processes have its token in their environment."""

    def __init__(self, folder: Path) -> None:
        self.dashboard, self._gcs = f"http://127.0.0.1:{free_port()}", free_port()
        self.folder = folder
        # Ray's own token, without which it answers nobody: others on this machine reach its ports.
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TRIVET_", "RAY_"))},
            **self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_MEMORY_MONITOR": "1",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_agent_register_timeout_ms": "300000",  # for a busy machine, as the line above
            "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # after which nodes end that have lost their head
            "OMP_NUM_THREADS": "1",
        }
        self._started = list[psutil.Popen]()
        self.head: psutil.Popen | None = None
        self.nodes = list[psutil.Popen]()

    def begin(self) -> None:
        """Start head and nodes, one after the other: those of one machine that start together may choose one port."""
        self.head = self.start_head()
        eventually(lambda: self.says() == "1 nodes, 0 CPUs, 0 GPUs")
        self.nodes = [self.add_node("2 nodes, 4 CPUs, 0 GPUs"), self.add_node(_ALL)]

    def start_head(self) -> psutil.Popen:
        ports = (f"--port={self._gcs}", f"--dashboard-port={self.dashboard.rpartition(':')[2]}")
        return self._start("--head", *ports, "--num-cpus=0", f"--temp-dir={self.folder}")

    def start_node(self) -> psutil.Popen:
        return self._start(f"--address=127.0.0.1:{self._gcs}", "--num-cpus=4")

    def add_node(self, then: str) -> psutil.Popen:
        """Start a node, and return it when the cluster says of itself what it then has."""
        node = self.start_node()
        eventually(lambda: self.says() == then)
        return node

    def launcher(self, service: str = "someone") -> Ray:
        before = {name: os.environ.get(name) for name in self.token}
        os.environ.update(self.token)
        try:
            return Ray(LauncherContext(service, self.folder, f"--address={self.dashboard}", 10.0))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def says(self) -> str:
        with contextlib.suppress(LauncherUnavailable):
            return self.launcher().describe()
        return ""

    def keep(self, over: threading.Event) -> None:
        """Start what has ended again, until ``over``."""
        while not over.wait(_LOOK_S):
            if self.head is not None and self.head.poll() is not None:
                self.head = self.start_head()
            for index, node in enumerate(self.nodes):
                if node.poll() is not None:
                    self.nodes[index] = self.start_node()
                    break  # the next one later, as at the beginning
            else:
                continue
            with contextlib.suppress(AssertionError):  # it has ended, or is looked at again
                eventually(lambda: over.is_set() or self.says() == _ALL, within_s=_REGISTERED_S)

    def kill(self, node: psutil.Popen) -> None:
        """As when a machine loses its power: nothing of it can do anything any more."""
        family = _family(node)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in family | _family(node):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        node.wait(LIMIT_S)

    def stop(self) -> None:
        """End every process that this cluster has started, and see that none is left."""
        for process in self._started:
            if process.poll() is None:
                self.kill(process)
        for left in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        eventually(lambda: self.processes() == [])

    def processes(self) -> list[psutil.Process]:
        """All that have this cluster's token, but for this process."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_of_it = process.environ().get("RAY_AUTH_TOKEN") == self.token["RAY_AUTH_TOKEN"]
                if is_of_it and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found

    def _start(self, *options: str) -> psutil.Popen:
        words = (Path(sys.executable).with_name("ray"), "start", "--block", "--node-ip-address=127.0.0.1", *options)
        with (self.folder / "started.log").open("ab") as log:
            started = psutil.Popen(
                [*map(str, words), "--num-gpus=0", "--disable-usage-stats"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(started)
        return started


def _family(process: psutil.Popen) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {psutil.Process(process.pid), *process.children(recursive=True)}
    return set()


def main(folder: Path) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    folder.mkdir(exist_ok=True)
    cluster = RayCluster(folder)
    try:
        cluster.begin()
        (folder / "cluster.part").write_text(json.dumps({"address": cluster.dashboard, **cluster.token}))
        (folder / "cluster.part").rename(folder / "cluster.json")
        cluster.keep(over)
    finally:
        cluster.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
