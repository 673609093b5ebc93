"""Ray, for real: a head and two nodes on this machine, a worker that asks them, and jobs that run there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from ray_cluster import RayCluster
from scheduled_site import Site
from waiting import eventually

from workers.launchers import AllocationRequest, LauncherContext, LauncherUnavailable
from workers.launchers.ray import Ray
from workers.launchers.ray_job import bundles

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, since its sockets lie there
    cluster = RayCluster(folder)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    options = {"TRIVET_RAY_OPTIONS": f"--address={cluster.dashboard}", "TRIVET_LEASE_S": "20", **cluster.token}
    with closing(Site("ray", tmp_path_factory.mktemp("site"), **options)) as site:
        yield site


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    yield shared
    shared.clear()


@pytest.mark.slow
@pytest.mark.distributed
@needs_ray
class TestOnAHeadAndTwoNodes:
    def test_a_gang_over_both_runs_as_anywhere_and_says_where(self, site: Site, cluster: RayCluster) -> None:
        job = site.submit("gang", 5)
        allocation = site.ended_as_anywhere(job, [3, 2])
        assert allocation.facts["submission"] == f"trivet-{allocation.id}"
        assert allocation.facts["nodes"].count(",") == 1
        eventually(lambda: [host.name for host in site.store.hosts.list()] == ["login"])
        (login,) = site.store.hosts.list()
        assert login.launchers["ray"] == "3 nodes, 8 CPUs, 0 GPUs"

    def test_a_cancelled_job_leaves_ray_whether_it_waits_or_runs(self, site: Site, cluster: RayCluster) -> None:
        asked = cluster.launcher(site.service)
        running = site.submit("running", 1, steps=10**6)
        site.works(running)
        waiting = site.submit("waiting", 8)
        eventually(lambda: "its placement group waits for nodes" in (site.now(waiting).reason or ""))
        site.store.jobs.cancel(waiting.id)
        eventually(lambda: [one.job_id for one in asked.allocations()] == [running.id])
        site.store.jobs.cancel(running.id)
        assert site.ended(running).state == "cancelled"
        eventually(lambda: asked.allocations() == [])

    def test_a_job_that_an_operator_of_ray_stops_goes_on_from_its_checkpoint(
        self, site: Site, cluster: RayCluster
    ) -> None:
        job = site.submit("endless", 2, steps=10**6, checkpoint={"every": 10**6})
        site.works(job)
        asked = cluster.launcher(site.service)
        asked.cancel(asked.allocations())
        assert "the service on its host stopped; queued again" in (site.until(job, "queued").reason or "")
        reached = max(event["step"] for event in site.events(job, "metric"))
        eventually(lambda: site.events(job, "metric")[-1]["step"] > reached)
        steps = site.steps(job)
        assert len(steps) == len(set(steps)) > 0, "no step was done twice"
        assert site.now(job).attempt == 2, site.said()
        site.store.jobs.cancel(job.id)
        assert site.ended(job).state == "cancelled"

    def test_a_node_that_dies_is_no_fault_of_the_job_which_runs_again(self, site: Site, cluster: RayCluster) -> None:
        job = site.submit("endless", 5, steps=10**6, checkpoint={"every": 50})
        site.works(job)
        cluster.kill(cluster.nodes.pop())
        assert "stopped renewing its lease; queued again without using a retry" in (
            site.until(job, "queued").reason or ""
        )
        eventually(lambda: cluster.says() == "2 nodes, 4 CPUs, 0 GPUs")
        cluster.nodes.append(cluster.add_node("3 nodes, 8 CPUs, 0 GPUs"))
        eventually(lambda: site.now(job).state == "running" and site.now(job).attempt == 2)
        assert site.now(job).spec["retries"] == 0, "it used none"
        site.store.jobs.cancel(job.id)
        assert site.ended(job).state == "cancelled"

    def test_a_head_that_does_not_answer_is_asked_again(self, cluster: RayCluster, tmp_path: Path) -> None:
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
