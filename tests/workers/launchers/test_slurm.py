"""Slurm, for real: a cluster of two nodes on this machine, a worker that asks it, and jobs that run there."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from scheduled_site import Site
from waiting import LIMIT_S, eventually
from worker_fleet import is_gone

from benchmarks.chaos_checks import Accepted, check_job
from workers.launchers import AllocationRequest, LauncherContext, LauncherUnavailable, asking
from workers.launchers.slurm import Slurm, tasks_per_node

SCRIPT = Path(__file__).parents[2] / "helpers" / "slurm_cluster.sh"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {SCRIPT.name} install; no {MISSING}")


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1]), ("3,2(x2),16", [3, 2, 2, 16])]
)
def test_slurms_spelling_of_tasks_is_read(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_a_step_with_gpus_has_as_many_devices_as_it_sees() -> None:
    environment = {
        "SLURM_JOB_ID": "12",
        "SLURM_RESTART_COUNT": "3",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_TASKS_PER_NODE": "3,1",
    }
    on_cpus = Slurm.here(environment)
    assert (on_cpus.allocation, on_cpus.index, on_cpus.count, on_cpus.pool, on_cpus.devices) == ("12.3", 1, 2, "cpu", 1)
    on_gpus = Slurm.here({**environment, "SLURM_GPUS_ON_NODE": "3"})
    assert (on_gpus.pool, on_gpus.devices, on_gpus.facts) == ("cuda", 3, {"partition": "gpu"})


@pytest.mark.parametrize(
    ("reason", "is_given_up"),
    [("JobHeldUser", False), ("launch failed requeued held", True), ("JobHoldMaxRequeue", True)],
)
def test_what_slurm_will_start_no_more_by_itself_is_given_up(
    reason: str, is_given_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '7|trivet-job_x|PENDING|{reason}|6|trivet:someone|'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (booking,) = Slurm(LauncherContext("someone", tmp_path, "", 10.0)).allocations()
    assert (booking.id, booking.job_id, booking.is_given_up) == ("7.6", "job_x", is_given_up)


class Watch:
    """Looks at the processes of jobs from outside, several times a second."""

    def __init__(self, job_ids: set[str]) -> None:
        self._job_ids, self.overlaps = job_ids, list[str]()
        self._together: dict[str, float] = {}
        self.ranks_seen = 0
        """How many there were at the last look."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def processes(self, module: str) -> list[psutil.Process]:
        """Return those that run a module of ours for one of the jobs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if module not in words or "srun" in words:
                    continue
                environment = process.environ()
                job_id = environment.get("TRIVET_JOB") or environment.get("SLURM_JOB_NAME", "").removeprefix("trivet-")
                if job_id in self._job_ids and not is_gone(process):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        return self.processes("workers.rank")

    def _look_on(self) -> None:
        """Note jobs of which ranks of two attempts live together for longer than it takes to end one."""
        while not self._over.wait(0.4):
            attempts: dict[str, set[str]] = {}
            ranks = self.ranks()
            self.ranks_seen = len(ranks)
            for rank in ranks:
                with contextlib.suppress(psutil.Error, KeyError):  # one that ends has no environment any more
                    environment = rank.environ()
                    attempts.setdefault(environment["TRIVET_JOB"], set()).add(environment["TRIVET_ATTEMPT"])
            now = time.monotonic()
            twice = [job_id for job_id, numbers in attempts.items() if len(numbers) > 1]
            self._together = {job_id: self._together.get(job_id, now) for job_id in twice}
            self.overlaps += [job_id for job_id, since in self._together.items() if now - since > 1.0]


def kill_one(processes: list[psutil.Process], draw: random.Random) -> None:
    if processes:
        draw.choice(processes).kill()


class Cluster:
    """Two nodes, n1 and n2, of four CPUs each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, *words: str) -> str:
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout

    def script(self, *words: str) -> None:
        subprocess.run([SCRIPT, *words], check=True)

    def queue(self) -> list[str]:
        """The names of all that Trivet has asked for."""
        return [name for name in self.call("squeue", "--noheader", "--format=%j").split() if name.startswith("trivet-")]

    def urgent(self, script: str, *options: str) -> str:
        """Submit a job of another program, which ends those of Trivet where it needs their CPUs; return its number."""
        words = ("--parsable", "--partition=urgent", "--output=/dev/null", f"--wrap={script}")
        return self.call("sbatch", *words, *options).strip()

    def is_in_queue(self, number: str, states: str = "pending,running") -> bool:
        return number in self.call("squeue", "--noheader", f"--states={states}", "--format=%i").split()

    @contextlib.contextmanager
    def filled(self, **cpus: int) -> Iterator[None]:
        """Other programs hold so many CPUs of each node meanwhile: a gang over both nodes needs few ranks."""
        held = [self.urgent("sleep 900", f"--nodelist={node}", f"--ntasks={count}") for node, count in cpus.items()]
        eventually(lambda: all(self.is_in_queue(number, "running") for number in held))
        try:
            yield
        finally:
            self.call("scancel", *held)

    def kill(self, daemon: str, node: str = "") -> None:
        """Kill ``slurmctld``, or a node's ``slurmd``, and start it again."""
        name = f"{daemon}-{node}" if node else daemon
        process = psutil.Process(int((self.folder / f"{name}.pid").read_text()))
        process.kill()
        eventually(lambda: is_gone(process))
        self.script(*(("node", str(self.folder), node) if node else ("control", str(self.folder))))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    try:
        Cluster(folder).script("start", str(folder))
        yield Cluster(folder)
    finally:
        Cluster(folder).script("stop", str(folder))


@pytest.fixture(scope="module")
def shared(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with contextlib.closing(
        Site("slurm", tmp_path_factory.mktemp("site"), SLURM_CONF=f"{cluster.folder}/slurm.conf")
    ) as site:
        yield site


@pytest.fixture
def site(shared: Site, cluster: Cluster) -> Iterator[Site]:
    yield shared
    shared.clear()
    cluster.call("scancel", "--me")
    eventually(lambda: cluster.queue() == [], within_s=2 * LIMIT_S)


real = [pytest.mark.slow(25), pytest.mark.distributed, needs_slurm]


class TestOnTwoNodes:
    pytestmark = real

    def test_a_gang_over_both_runs_as_anywhere_and_says_where(self, site: Site, cluster: Cluster) -> None:
        with cluster.filled(n1=2, n2=3):
            job = site.submit("gang", 3)
            site.until(job, "running")
            hosts = {host.name: host for host in site.store.hosts.list() if host.allocation is not None}
            assert {(host.allocation.devices, host.allocation.job) for host in hosts.values() if host.allocation} == {
                (2, job.id),
                (1, job.id),
            }
            allocation = site.ended_as_anywhere(job, [2, 1])
        assert (allocation.facts["partition"], allocation.facts["nodes"]) == ("main", "n[1-2]")
        eventually(lambda: [host.name for host in site.store.hosts.list()] == ["login"])
        (login,) = site.store.hosts.list()
        assert login.launchers["slurm"].startswith("main: ")
        eventually(lambda: cluster.queue() == [])

    def test_a_preempted_gang_goes_on_from_its_checkpoint_without_a_retry_until_it_is_cancelled(
        self, site: Site, cluster: Cluster
    ) -> None:
        with cluster.filled(n1=3, n2=3):
            job = site.submit("endless", 2, steps=10**6, checkpoint={"every": 10**6})
            site.works(job)
            urgent = cluster.urgent("sleep 1", "--ntasks=2")
            assert site.until(job, "queued").reason is not None
            assert "the service on its host stopped; queued again" in (site.now(job).reason or "")
            reached = max(event["step"] for event in site.events(job, "metric"))
            eventually(lambda: site.events(job, "metric")[-1]["step"] > reached, within_s=2 * LIMIT_S)
            steps = site.steps(job)
            assert len(steps) == len(set(steps)) > 0, "no step was done twice"
            assert site.now(job).attempt == 2, site.said()
            assert len(site.now(job).placement) == 2
            assert not cluster.is_in_queue(urgent)
            site.store.jobs.cancel(job.id)
            assert site.ended(job).state == "cancelled"
            eventually(lambda: cluster.queue() == [])

    def test_a_cancelled_job_leaves_slurms_queue_while_it_waits(self, site: Site, cluster: Cluster) -> None:
        with cluster.filled(n1=1):
            waiting = site.submit("waiting", 8)
            eventually(lambda: f"trivet-{waiting.id}" in cluster.queue())
            eventually(lambda: "is pending" in (site.now(waiting).reason or ""))
            site.store.jobs.cancel(waiting.id)
            eventually(lambda: f"trivet-{waiting.id}" not in cluster.queue())

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"device": "cuda"}, "slurm refused it: sbatch: "),
            ({"parallel": {"dp_shard": 9}}, "is pending, PartitionConfig"),
        ],
        ids=["refused", "never possible"],
    )
    def test_a_job_tells_what_slurm_says_of_it(self, site: Site, fields: dict[str, Any], said: str) -> None:
        job = site.submit("odd", 2, **fields, batch={"global": 18})
        eventually(lambda: said in (site.now(job).reason or ""))
        site.store.jobs.cancel(job.id)

    def test_a_cluster_that_does_not_answer_is_asked_again(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
        slurm = Slurm(LauncherContext("someone", tmp_path, "--hold --comment=other", 10.0))
        request = AllocationRequest("job_x", "train", 2, 1, "cpu", 0, 90.0, ("true",))
        slurm.request(request)
        assert slurm.allocations() == [], "what another service asked for is left alone"
        own = Slurm(LauncherContext("someone", tmp_path, "--hold", 10.0))
        own.request(request)
        (allocation,) = own.allocations()
        assert (allocation.job_id, allocation.is_waiting) == ("job_x", True)
        assert "JobHeldUser" in allocation.reason
        assert "TimeLimit=00:03:00" in cluster.call("scontrol", "show", "job", allocation.id.partition(".")[0])
        own.cancel([allocation])
        assert own.allocations() == []
        cluster.call("scancel", "--me")
        monkeypatch.setattr(asking, "ANSWER_S", 1.0)
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere.conf"))
        with pytest.raises(LauncherUnavailable, match="squeue"):
            own.allocations()

    def test_faults_lose_no_job_and_run_none_twice(self, site: Site, cluster: Cluster) -> None:
        """Slurm's daemons, a host of an allocation, a supervisor, the worker and the broker are killed under them."""
        jobs = [site.submit(f"{ranks} ranks", ranks, steps=150, checkpoint={"every": 25}) for ranks in (1, 2)]
        draw = random.Random(31)
        with Watch({job.id for job in jobs}) as watch:
            for kill in (
                lambda: cluster.kill("slurmctld"),
                lambda: cluster.kill("slurmd", "n1"),
                lambda: kill_one(watch.processes("workers.agent.allocated_host"), draw),
                lambda: kill_one(watch.processes("workers.supervisor"), draw),
                site.restart,
                site.broker.restart,
                lambda: cluster.kill("slurmd", "n2"),
            ):
                eventually(lambda: watch.ranks_seen or site.all_ended(jobs), within_s=2 * LIMIT_S)
                kill()
            ended = [site.ended(job) for job in jobs]
        assert (told := site.failures(ended)) == [], f"{told}\n{site.said()}"
        violations = [
            violation
            for job in ended
            for violation in check_job(job, site.history(job), Accepted("short", job.spec, job.id))
        ]
        assert violations == []
        assert watch.overlaps == [], "never do two attempts of a job compute together"
        assert sum(job.attempt for job in ended) > len(jobs), "faults hit some of them"
        eventually(lambda: cluster.queue() == [], within_s=2 * LIMIT_S)
        assert watch.ranks() == []
        eventually(lambda: [host.name for host in site.store.hosts.list()] == ["login"])
