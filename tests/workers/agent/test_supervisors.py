"""Supervisors are forks of one process that has imported everything, and no job notices when they are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import eventually
from worker_fleet import SUPERVISOR, Fleet, is_gone, processes_of, supervisors_on_host

from service.jobs.records import AttemptRef
from service.jobs.store import StoreLimits
from workers.agent import fork_servers
from workers.agent.supervisors import Supervisors
from workers.supervisor.settings import SupervisorOrder

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forks") / "supervisors.log"


@pytest.fixture(scope="module")
def forks(log: Path) -> Iterator[Supervisors]:
    supervisors = Supervisors(SUPERVISOR, log, forks=True, restart_after_s=0.0)
    yield supervisors
    supervisors.close()


def server(forks: Supervisors) -> psutil.Process:
    """The process that forks, once it is ready."""

    def ready() -> psutil.Process | None:
        forks.tend()
        return psutil.Process(found._process.pid) if (found := forks._full.ready()) else None

    return eventually(ready)


def supervisor_of(fleet: Fleet) -> psutil.Process:
    (found,) = eventually(lambda: supervisors_on_host(fleet))
    return found


def look_around(fleet: Fleet, ref: AttemptRef) -> dict[str, Any]:
    """What the ranks of a job find, but for what is this job's own."""
    ended = fleet.ended(ref)
    assert ended.result is not None, ended.error
    found = {name: str(value).replace(ref.job_id, "JOB") for name, value in ended.result["found"].items()}
    hosts = [str((Path("/proc/self/ns") / name).readlink()) for name in ("user", "mnt", "net", "ipc")]
    spaces: list[str] = literal_eval(found["namespaces"])
    return found | {"namespaces": str([own == host for own, host in zip(spaces, hosts, strict=True)])}


READY_AT_ONCE = """
import os
os.write(0, b"ready")
while os.read(0, 1):  # and then it has hung up
    pass
"""


def mount_points() -> set[str]:
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def test_a_part_that_a_supervisor_has_is_left_to_it(log: Path) -> None:
    """Its message comes again until it is claimed, which takes a while on a busy host."""
    order = SupervisorOrder("job_x", 1, "alpha", "127.0.0.1", "unix:///nowhere", "/nowhere", 1.0, StoreLimits())
    supervisors = Supervisors(
        [sys.executable, "-c", "import time; time.sleep(3600)"], log, forks=False, restart_after_s=0
    )
    for _ in range(3):
        supervisors.start(order)
    (first,) = supervisors.at_work()
    supervisors.start(replace(order, attempt=2))
    assert len(supervisors.at_work()) == 2, "another part is not"
    psutil.Process(first).kill()
    eventually(lambda: first not in supervisors.at_work())
    supervisors.start(order)
    again = supervisors.at_work()
    assert len(again) == 2, "one that ended has it no longer"
    for pid in again:
        psutil.Process(pid).kill()


def test_a_supervisor_that_has_ended_leaves_no_zombie_until_the_next_heartbeat(log: Path) -> None:
    order = SupervisorOrder("job_x", 1, "alpha", "127.0.0.1", "unix:///nowhere", "/nowhere", 1.0, StoreLimits())
    supervisors = Supervisors([sys.executable, "-c", "input()"], log, forks=False, restart_after_s=0)
    supervisors.start(order)
    pid = supervisors._parts[order.ref].pid
    eventually(lambda: not psutil.pid_exists(pid))


def test_a_light_server_takes_the_place_of_an_idle_one_until_another_is_ready(log: Path) -> None:
    order = SupervisorOrder("job_x", 1, "alpha", "127.0.0.1", "unix:///nowhere", "/nowhere", 1.0, StoreLimits())
    supervisors = Supervisors([sys.executable, "-c", READY_AT_ONCE], log, forks=True, restart_after_s=0.2, idle_s=0.5)
    supervisors.tend()
    full, light = supervisors._full, supervisors._light
    assert (full.process is None, light.process is None) == (False, True)
    eventually(lambda: (supervisors.tend(), full.process is None and light.ready())[1])
    supervisors.tend()
    assert full.process is None, "nothing needs another one"
    supervisors.start(order)
    supervisors.tend()
    assert full.process is None, "the supervisor has the processor first"
    eventually(lambda: (supervisors.tend(), full.ready())[1])
    supervisors.tend()
    assert light.process is None
    supervisors.close()


@pytest.mark.slow
def test_a_fork_of_the_server_runs_a_part_and_knows_no_more_than_a_new_interpreter(
    fleet: Fleet, forks: Supervisors, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, limits, namespaces, files, descriptors, signals and identity are the same."""
    monkeypatch.setenv("TRIVET_REDIS_PASSWORD", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    parent = server(forks)
    refs = [fleet.submit("surroundings", ranks=2) for _ in range(2)]
    forks.start(fleet.order(refs[0]))
    supervisor = supervisor_of(fleet)
    assert supervisor.ppid() == parent.pid
    mounted = [mount_points()]
    forked = look_around(fleet, refs[0])
    mounted.append(mount_points())
    interpreters = Supervisors(SUPERVISOR, log, forks=False, restart_after_s=0.0)
    interpreters.start(fleet.order(refs[1]))
    fresh = look_around(fleet, refs[1])
    mounted.append(mount_points())
    # Containers that others start or stop meanwhile come and go in every process's mounts.
    passing = set.union(*mounted) - set.intersection(*mounted)
    for found in (forked, fresh):
        found["mounts"] = str([each for each in literal_eval(found["mounts"]) if each not in passing])
    different = {name: (forked[name], fresh[name]) for name in fresh if forked[name] != fresh[name]}
    assert different == {}, json.dumps(different, indent=1)
    assert "hush" not in json.dumps(forked)
    assert {"environment", "limits", "namespaces", "descriptors", "status"} <= forked.keys()
    eventually(lambda: not supervisor.is_running())
    eventually(lambda: interpreters.at_work() == [])


def test_a_fork_of_a_light_server_runs_a_part(fleet: Fleet, log: Path) -> None:
    """It imports torch where the other servers had it."""
    supervisors = Supervisors(SUPERVISOR, log, forks=True, restart_after_s=60.0, idle_s=1e-9)
    eventually(lambda: (supervisors.tend(), supervisors._light.ready())[1])
    parent = psutil.Process(supervisors._light.process._process.pid)  # type: ignore[union-attr]
    assert "libtorch" not in Path(f"/proc/{parent.pid}/maps").read_text()
    assert parent.num_threads() == 1
    ref = fleet.submit("nothing", ranks=2)
    supervisors.start(fleet.order(ref))
    assert supervisor_of(fleet).ppid() == parent.pid
    assert fleet.ended(ref).state == "succeeded"
    supervisors.close()


@pytest.mark.slow
def test_a_server_that_is_killed_takes_nothing_along_and_is_replaced(fleet: Fleet, forks: Supervisors) -> None:
    first = server(forks)
    running = fleet.submit("until_told")
    forks.start(fleet.order(running))
    eventually(lambda: fleet.events(running, "metric"))
    first.kill()
    first.wait()
    meanwhile = fleet.submit("nothing")
    forks.start(fleet.order(meanwhile))
    second = server(forks)
    assert second.pid != first.pid
    later = fleet.submit("until_told")
    forks.start(fleet.order(later))
    for ref in (running, later):
        (fleet.data.job(ref.job_id).root).mkdir(parents=True, exist_ok=True)
        (fleet.data.job(ref.job_id).root / "go").touch()
    assert [fleet.ended(ref).state for ref in (running, meanwhile, later)] == ["succeeded"] * 3
    assert [fleet.job(ref).attempt for ref in (running, meanwhile, later)] == [1, 1, 1]


def test_a_fork_that_dies_leaves_nothing_and_the_server_forks_on(fleet: Fleet, forks: Supervisors) -> None:
    parent = server(forks)
    ref = fleet.submit("endless")
    forks.start(fleet.order(ref))
    eventually(lambda: fleet.printed(ref, "working"))
    supervisor = supervisor_of(fleet)
    assert supervisor.pid in forks.at_work()
    below = supervisor.children(recursive=True)
    supervisor.kill()
    eventually(lambda: processes_of(ref) == [])
    eventually(lambda: supervisor.pid not in forks.at_work())
    eventually(lambda: not any(process.is_running() for process in below))
    fleet.expire_lease(ref)
    fleet.store.attempts.reap()
    fleet.store.jobs.cancel(ref.job_id)
    follower = fleet.submit("nothing")
    forks.start(fleet.order(follower))
    assert fleet.ended(follower).state == "succeeded"
    assert server(forks).pid == parent.pid


def test_a_job_that_was_cancelled_before_its_fork_starts_nothing(fleet: Fleet, forks: Supervisors) -> None:
    """Its message may be under way when that happens."""
    parent = server(forks)
    ref = fleet.submit("endless")
    order = fleet.order(ref)
    fleet.store.jobs.cancel(ref.job_id)
    forks.start(order)
    supervisor = forks._parts[ref]
    assert supervisor in forks._forked
    eventually(lambda: supervisor.pid not in forks.at_work())
    assert fleet.job(ref).state == "cancelled"
    assert processes_of(ref) == []
    assert not fleet.data.job(ref.job_id).attempt(1).exists()
    assert server(forks).pid == parent.pid


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(
    fleet: Fleet, forks: Supervisors, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = server(forks)
    stopped.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fork_servers, "_ANSWER_S", 0.2)
    ref = fleet.submit("nothing")
    forks.start(fleet.order(ref))
    assert fleet.ended(ref).state == "succeeded"
    eventually(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)


def test_the_server_knows_no_secret_and_has_one_thread(forks: Supervisors) -> None:
    parent = server(forks)
    assert not {name for name in parent.environ() if name.startswith("TRIVET_")} - {"TRIVET_ROOM"}
    assert parent.num_threads() == 1


@pytest.mark.slow
def test_the_server_ends_with_its_agent(forks: Supervisors) -> None:
    parent = server(forks)
    os.close(forks._full.process._control.detach())  # type: ignore[union-attr]
    eventually(lambda: not parent.is_running() or parent.status() == psutil.STATUS_ZOMBIE)


AGENT = """
import sys
from pathlib import Path
from workers.agent.supervisors import Supervisors

command = [sys.executable, "-m", "workers.supervisor"]
supervisors = Supervisors(command, Path(sys.argv[1]), forks=True, restart_after_s=0)
supervisors.tend()
print(supervisors._full.process._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_server_whose_agent_is_killed_imports_nothing_more(log: Path) -> None:
    """It is stopped, so that it cannot see by itself that its agent has gone."""
    command = [sys.executable, "-c", AGENT, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        importing = psutil.Process(int(agent.stdout.readline()))
        eventually(lambda: "libtorch" in Path(f"/proc/{importing.pid}/maps").read_text())
        importing.send_signal(signal.SIGSTOP)
        agent.kill()
    eventually(lambda: is_gone(importing))
