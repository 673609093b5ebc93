"""Jobs of Kubernetes: what is sent to the API server, what its answers mean, and gangs in the pods that it starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled_site import Site
from waiting import LIMIT_S, eventually

from workers.launchers import AllocationRequest, LauncherContext, LauncherUnavailable

for package in ("kubernetes", "kubernetes_validate"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'trivet[kubernetes,dev]'")

import kubernetes_validate  # noqa: E402 - after the skip
from fake_kubernetes import SCHEMAS, FakeKubernetes  # noqa: E402

from workers.launchers.kubernetes import Kubernetes, pods  # noqa: E402

TEMPLATE = Path(__file__).parents[3] / "docker" / "kubernetes" / "attempt.yaml"
REQUEST = AllocationRequest("job_x", "train", 6, 2, "cuda", 0, None, ("true",))


@given(ranks=st.integers(1, 200), most=st.integers(1, 16), max_hosts=st.integers(1, 64))
def test_each_rank_has_a_place_in_one_pod(ranks: int, most: int, max_hosts: int) -> None:
    if math.ceil(ranks / most) > max_hosts:
        with pytest.raises(LauncherUnavailable, match="max_hosts"):
            pods(ranks, max_hosts, most)
        return
    count, size = pods(ranks, max_hosts, most)
    environment = f'{{"name": "x", "ranks": {ranks}, "size": {size}, "pool": "cpu", "facts": {{}}}}'
    hosts = [
        Kubernetes.here({"TRIVET_KUBERNETES": environment, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(count)
    ]
    assert sum(host.devices for host in hosts) == ranks
    assert all(1 <= host.devices <= size <= most for host in hosts)
    assert {host.count for host in hosts} == {count}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeKubernetes]:
    cluster = FakeKubernetes(tmp_path)
    yield cluster
    cluster.close()


def options(*more: str) -> str:
    return " ".join([f"--template={TEMPLATE}", "--namespace=lab", "--devices-per-pod=4", *more])


@pytest.fixture
def launcher(cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    monkeypatch.setenv("KUBECONFIG", str(cluster.config))
    return Kubernetes(LauncherContext("one", tmp_path, options("--queue=gpu"), 10.0))


def test_a_job_has_a_pod_for_each_host_and_a_place_in_kueues_queue(
    cluster: FakeKubernetes, launcher: Kubernetes
) -> None:
    name = launcher.request(REQUEST)
    sent = cluster.jobs[name].manifest
    spec, labels = sent["spec"], sent["metadata"]["labels"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (spec["backoffLimit"], spec["suspend"], labels["kueue.x-k8s.io/queue-name"]) == (0, True, "gpu")
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 25)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "3"
    assert pod["containers"][0]["command"] == ["true"]
    (booking,) = launcher.allocations()
    assert (booking.id, booking.job_id, booking.is_waiting) == (name, "job_x", True)
    assert booking.reason == f"Kubernetes job {name}: is in the queue gpu"
    assert launcher.describe() == "namespace lab, queue gpu: 0 jobs run, 1 wait"
    launcher.cancel([booking])
    assert launcher.allocations() == []
    launcher.cancel([booking])


@pytest.mark.parametrize("version", ["1.30", SCHEMAS, "1.37"])
@pytest.mark.parametrize("device", ["cuda", "cpu", "auto"])
def test_its_manifest_is_what_the_published_schemas_allow(launcher: Kubernetes, version: str, device: str) -> None:
    request = dataclasses.replace(REQUEST, device=device)  # type: ignore[arg-type]
    kubernetes_validate.validate(launcher.manifest(request), version, strict=True)


def test_a_schema_refuses_what_is_none(launcher: Kubernetes) -> None:
    manifest = launcher.manifest(REQUEST)
    manifest["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        kubernetes_validate.validate(manifest, SCHEMAS, strict=True)


def test_a_job_without_a_node_says_why_in_kubernetes_words(
    cluster: FakeKubernetes, launcher: Kubernetes, tmp_path: Path
) -> None:
    cluster.has_room = False
    unqueued = Kubernetes(LauncherContext("two", tmp_path, options(), 10.0))
    name = unqueued.request(REQUEST)
    (booking,) = unqueued.allocations()
    assert booking.reason == f"Kubernetes job {name}: 0/3 nodes are available: insufficient cpu"
    assert launcher.allocations() == [], "what another service asked for is left alone"


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_whose_pods_have_ended_is_no_allocation(cluster: FakeKubernetes, launcher: Kubernetes, code: int) -> None:
    name = launcher.request(dataclasses.replace(REQUEST, command=("sh", "-c", f"exit {code}")))
    cluster.admit(name)
    eventually(lambda: launcher.allocations() == [])
    assert name in cluster.names(), "kept for its log, and no longer held for an allocation"


def test_what_kubernetes_refuses_is_told(
    cluster: FakeKubernetes, launcher: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Kubernetes(LauncherContext("one", tmp_path, options("--namespace=other"), 10.0))
    with pytest.raises(LauncherUnavailable, match=r"Kubernetes: 403, .* is forbidden"):
        elsewhere.allocations()
    with pytest.raises(LauncherUnavailable, match="6 ranks need 2 pods of 4 devices each, and max_hosts is 1"):
        launcher.request(dataclasses.replace(REQUEST, max_hosts=1))
    monkeypatch.setenv("KUBECONFIG", str(cluster.strangers_config))
    with pytest.raises(LauncherUnavailable, match="Kubernetes: 401, Unauthorized"):
        Kubernetes(LauncherContext("one", tmp_path, options(), 10.0)).allocations()
    cluster.close()
    with pytest.raises(LauncherUnavailable, match="Kubernetes"):
        launcher.allocations()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="Kubernetes cannot be reached"):
        Kubernetes(LauncherContext("one", tmp_path, options(), 10.0))


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ("", "--template=FILE is missing"),
        ("--template={folder}/nothing.yaml --queue", "expected one argument"),
        ("--template={folder}/empty.yaml", "not a manifest of a Job with a container"),
        (f"--template={TEMPLATE} --devices-per-pod=0", "at least 1"),
        (f"--template={TEMPLATE} --gpus=2", "there is no option --gpus=2"),
    ],
)
def test_options_that_cannot_be_used_are_named(tmp_path: Path, given_options: str, said: str) -> None:
    (tmp_path / "empty.yaml").write_text("kind: Job\nspec: {}\n")
    with pytest.raises(ValueError, match=said):
        Kubernetes(LauncherContext("one", tmp_path, given_options.format(folder=tmp_path), 10.0))


@pytest.fixture(scope="module")
def pods_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKubernetes]:
    with closing(FakeKubernetes(tmp_path_factory.mktemp("pods"))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(pods_cluster: FakeKubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    words = options("--queue=cpu", "--auto=cpu", "--devices-per-pod=2")
    settings = {"KUBECONFIG": str(pods_cluster.config), "TRIVET_KUBERNETES_OPTIONS": words}
    with closing(Site("kubernetes", tmp_path_factory.mktemp("kubernetes"), **settings)) as site:
        yield site


@pytest.fixture
def site(shared: Site, pods_cluster: FakeKubernetes) -> Iterator[Site]:
    yield shared
    shared.clear()
    pods_cluster.clear()


@pytest.mark.slow
@pytest.mark.distributed
class TestWithPods:
    def test_a_gang_in_two_pods_runs_as_anywhere_and_says_where(self, site: Site, pods_cluster: FakeKubernetes) -> None:
        job = site.submit("gang", 3)
        (name,) = eventually(pods_cluster.names)
        eventually(lambda: f"Kubernetes job {name}: is in the queue cpu" == site.now(job).reason)
        pods_cluster.admit(name)
        allocation = site.ended_as_anywhere(job, [2, 1])
        assert (allocation.id, allocation.facts) == (name, {"namespace": "lab", "job": name, "queue": "cpu"})
        eventually(lambda: [host.name for host in site.store.hosts.list()] == ["login"])
        eventually(lambda: pods_cluster.jobs[name].status["conditions"])

    def test_a_preempted_job_goes_on_from_its_checkpoint_in_a_job_of_its_own(
        self, site: Site, pods_cluster: FakeKubernetes
    ) -> None:
        job = site.submit("endless", 1, steps=10**6, checkpoint={"every": 10**6})
        (first,) = eventually(pods_cluster.names)
        pods_cluster.admit(first)
        site.works(job)
        pods_cluster.suspend(first)
        assert "the service on its host stopped; queued again" in (site.until(job, "queued").reason or "")
        reached = max(event["step"] for event in site.events(job, "metric"))
        (second,) = eventually(lambda: [name for name in pods_cluster.names() if name != first])
        assert first not in pods_cluster.names()
        pods_cluster.admit(second)
        eventually(lambda: site.events(job, "metric")[-1]["step"] > reached, within_s=2 * LIMIT_S)
        steps = site.steps(job)
        assert len(steps) == len(set(steps)) > 0, "no step was done twice"
        site.store.jobs.cancel(job.id)
        assert site.ended(job).state == "cancelled"

    def test_a_cancelled_job_leaves_the_queue_at_once(self, site: Site, pods_cluster: FakeKubernetes) -> None:
        job = site.submit("waiting", 4)
        eventually(pods_cluster.names)
        site.store.jobs.cancel(job.id)
        eventually(lambda: pods_cluster.names() == [])
