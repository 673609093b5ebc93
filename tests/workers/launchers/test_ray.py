"""Ray, for real: a head and two nodes on this machine, a worker that asks them, and jobs that run there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled_site import Site
from waiting import LIMIT_S, eventually
from worker_fleet import MortalBroker

from service.jobs.layout import DataLayout
from service.jobs.store import Store
from workers.launchers import AllocationRequest, LauncherContext, LauncherUnavailable
from workers.launchers.ray import Ray, bundles

MISSING = [name for name in ("ray", "aiohttp_cors") if find_spec(name) is None]
needs_ray = pytest.mark.skipif(bool(MISSING), reason=f"Ray is not installed: pip install 'trivet[ray]'; no {MISSING}")


@given(ranks=st.integers(1, 64), max_hosts=st.integers(1, 8), nodes=st.lists(st.integers(0, 16), max_size=8))
def test_ranks_get_bundles_on_as_few_nodes_as_can_be(ranks: int, max_hosts: int, nodes: list[int]) -> None:
    found = bundles(ranks, max_hosts, nodes)
    largest = sorted(nodes, reverse=True)
    if found is None:
        assert sum(largest[:max_hosts]) < ranks
        return
    assert sum(found) == ranks
    assert min(found) >= 1
    assert len(found) <= max_hosts
    assert sum(largest[: len(found) - 1]) < ranks, "fewer nodes do not hold them"
    assert all(size <= has for size, has in zip(found, largest, strict=False))


@pytest.mark.parametrize(
    ("ranks", "nodes", "sizes"),
    [(6, [4, 4], [3, 3]), (6, [2, 4], [4, 2]), (5, [4, 4, 4], [3, 2]), (4, [1, 4], [4]), (3, [0, 2], None)],
)
def test_bundles_are_as_even_as_nodes_allow(ranks: int, nodes: Sequence[int], sizes: list[int] | None) -> None:
    assert bundles(ranks, 2, nodes) == sizes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """A head without CPUs, and nodes of four each; all processes of one end with it."""

    def __init__(self, folder: Path) -> None:
        self.dashboard, self._gcs = f"http://127.0.0.1:{free_port()}", free_port()
        self._folder = folder
        # Ray's own token, without which it answers nobody: others on this machine reach its ports.
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TRIVET_", "RAY_"))},
            **self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_MEMORY_MONITOR": "1",
            "RAY_raylet_start_wait_time_s": "120",
            "OMP_NUM_THREADS": "1",
        }
        self._started = list[psutil.Popen]()
        self.nodes = list[psutil.Popen]()

    def begin(self) -> None:
        port = self.dashboard.rpartition(":")[2]
        self.start(
            "--head", f"--port={self._gcs}", f"--dashboard-port={port}", "--num-cpus=0", f"--temp-dir={self._folder}"
        )
        eventually(lambda: self.says() == "1 nodes, 0 CPUs, 0 GPUs")
        # One after the other: nodes of one machine that start together may choose the same ports.
        self.nodes = [self.add_node("2 nodes, 4 CPUs, 0 GPUs"), self.add_node("3 nodes, 8 CPUs, 0 GPUs")]

    def start(self, *options: str) -> psutil.Popen:
        words = (Path(sys.executable).with_name("ray"), "start", "--block", "--node-ip-address=127.0.0.1", *options)
        with (self._folder / "started.log").open("ab") as log:
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

    def add_node(self, then: str) -> psutil.Popen:
        node = self.start(f"--address=127.0.0.1:{self._gcs}", "--num-cpus=4")
        eventually(lambda: self.says() == then)
        return node

    def launcher(self, service: str = "someone") -> Ray:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.token.items():
                patch.setenv(name, value)
            return Ray(LauncherContext(service, self._folder, f"--address={self.dashboard}", 10.0))

    def says(self) -> str:
        with contextlib.suppress(LauncherUnavailable):
            return self.launcher().describe()
        return ""

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
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        eventually(lambda: self.processes() == [])

    def processes(self) -> list[psutil.Process]:
        """All that have this cluster's token."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_of_it = process.environ().get("RAY_AUTH_TOKEN") == self.token["RAY_AUTH_TOKEN"]
                if is_of_it and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found


def _family(process: psutil.Popen) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {psutil.Process(process.pid), *process.children(recursive=True)}
    return set()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, since its sockets lie there
    cluster = Cluster(folder)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def site(cluster: Cluster, mortal: MortalBroker, data: DataLayout, tmp_path: Path) -> Iterator[Site]:
    store = Store.connect(mortal.server.url, data)
    options = {"TRIVET_RAY_OPTIONS": f"--address={cluster.dashboard}", "TRIVET_LEASE_S": "20", **cluster.token}
    site = Site("ray", store, data, tmp_path / "worker.log", mortal.server.url, **options)
    yield site
    site.worker.terminate()
    site.worker.wait(LIMIT_S)
    store.close()


@pytest.mark.slow
@pytest.mark.distributed
@needs_ray
class TestOnAHeadAndTwoNodes:
    def test_a_gang_over_both_runs_as_anywhere_and_says_where(self, site: Site, cluster: Cluster) -> None:
        job = site.submit("gang", 6)
        ended = site.ended(job)
        assert (ended.state, ended.attempt, ended.launcher) == ("succeeded", 1, "ray"), site.said()
        assert ended.allocation is not None
        assert ended.allocation.facts["submission"] == f"trivet-{ended.allocation.id}"
        assert ended.allocation.facts["nodes"].count(",") == 1
        assert [len(share.devices) for share in ended.placement] == [3, 3]
        assert [event["state"] for event in site.events(job, "state")] == ["queued", "starting", "running", "succeeded"]
        eventually(lambda: [host.name for host in site.store.hosts.list()] == ["login"])
        (login,) = site.store.hosts.list()
        assert login.launchers["ray"] == "3 nodes, 8 CPUs, 0 GPUs"

    def test_a_cancelled_job_leaves_ray_whether_it_waits_or_runs(self, site: Site, cluster: Cluster) -> None:
        asked = cluster.launcher(site.service)
        running = site.submit("running", 8, steps=10**6)
        site.works(running)
        waiting = site.submit("waiting", 8)
        eventually(lambda: "its placement group waits for nodes" in (site.now(waiting).reason or ""))
        site.store.jobs.cancel(waiting.id)
        eventually(lambda: [one.job_id for one in asked.allocations()] == [running.id])
        site.store.jobs.cancel(running.id)
        assert site.ended(running).state == "cancelled"
        eventually(lambda: asked.allocations() == [])

    def test_a_job_that_an_operator_of_ray_stops_goes_on_from_its_checkpoint(
        self, site: Site, cluster: Cluster
    ) -> None:
        job = site.submit("endless", 5, steps=10**6, checkpoint={"every": 10**6})
        site.works(job)
        asked = cluster.launcher(site.service)
        asked.cancel(asked.allocations())
        assert "the service on its host stopped; queued again" in (site.until(job, "queued").reason or "")
        reached = max(event["step"] for event in site.events(job, "metric"))
        eventually(lambda: site.events(job, "metric")[-1]["step"] > reached)
        steps = [event["step"] for event in site.events(job, "metric")]
        assert len(steps) == len(set(steps)), "no step was done twice"
        assert site.now(job).attempt == 2, site.said()
        site.store.jobs.cancel(job.id)
        assert site.ended(job).state == "cancelled"

    def test_a_node_that_dies_is_no_fault_of_the_job_which_runs_again(self, site: Site, cluster: Cluster) -> None:
        job = site.submit("endless", 8, steps=10**6, checkpoint={"every": 50})
        site.works(job)
        cluster.kill(cluster.nodes.pop())
        reason = site.until(job, "queued").reason or ""
        assert "lost" in reason or "silent" in reason, reason
        eventually(lambda: cluster.says() == "2 nodes, 4 CPUs, 0 GPUs")
        cluster.nodes.append(cluster.add_node("3 nodes, 8 CPUs, 0 GPUs"))
        eventually(lambda: site.now(job).state == "running" and site.now(job).attempt == 2)
        assert site.now(job).spec["retries"] == 0, "it used none"
        site.store.jobs.cancel(job.id)
        assert site.ended(job).state == "cancelled"

    def test_a_head_that_does_not_answer_is_asked_again(self, cluster: Cluster, tmp_path: Path) -> None:
        request = AllocationRequest("job_x", "train", 9, 2, "cpu", 0, 90.0, ("true",))
        other, own = cluster.launcher("other"), cluster.launcher("own")
        other.request(request)
        assert own.allocations() == [], "what another service asked for is left alone"
        (allocation,) = other.allocations()
        assert (allocation.job_id, allocation.is_waiting) == ("job_x", True)
        other.cancel([allocation])
        eventually(lambda: other.allocations() == [])
        other.cancel([allocation])
        nowhere = Ray(LauncherContext("own", tmp_path, f"--address=http://127.0.0.1:{free_port()}", 10.0))
        with pytest.raises(LauncherUnavailable, match="Ray at"):
            nowhere.allocations()
        without_token = Ray(LauncherContext("own", tmp_path, f"--address={cluster.dashboard}", 10.0))
        with pytest.raises(LauncherUnavailable, match=r"401|403"):
            without_token.allocations()
