"""A group fails by the hand of one rank; the others fail in its wake, and may well be heard of first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from waiting import eventually
from worker_fleet import SHORT_LEASES, Fleet, all_gone, family, is_gone, processes_of, rank_process

from service.jobs.records import AttemptRef, Job, JobError

pytestmark = [pytest.mark.distributed, pytest.mark.waits]


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """Processes that do not run meanwhile, as on a busy machine: afterwards they see all that happened at once."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def two_ranks(fleet: Fleet) -> tuple[AttemptRef, list[psutil.Process], psutil.Process, psutil.Process]:
    """Ranks that wait for each other in a collective; with them their supervisor and torchrun."""
    ref = fleet.submit("waiting", ranks=2)
    supervisor = psutil.Process(fleet.supervise(ref).pid)
    eventually(lambda: sum("met the others" in event["line"] for event in fleet.events(ref, "log")) == 2)
    ranks = [rank_process(ref, rank) for rank in range(2)]
    return ref, ranks, supervisor, supervisor.children()[0].children()[0]


def failed(fleet: Fleet, ref: AttemptRef) -> JobError:
    job = fleet.ended(ref)
    assert job.state == "failed"
    assert job.error is not None
    assert processes_of(ref) == []
    return job.error


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "was killed by SIGKILL; the kernel's out-of-memory killer"),
        pytest.param(signal.SIGTERM, "was ended by SIGTERM, which the service did not send", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_was_signalled_is_the_cause_although_all_ends_are_seen_at_once(
    fleet: Fleet, number: signal.Signals, said: str
) -> None:
    ref, ranks, supervisor, _ = two_ranks(fleet)
    with stopped(supervisor):
        ranks[1].send_signal(number)
        eventually(lambda: all_gone(ranks))
    error = failed(fleet, ref)
    assert (error.type, error.rank) == ("RankDied", 1)
    assert said in error.message


@pytest.mark.slow
def test_the_rank_that_was_killed_is_the_cause_although_torchrun_never_tells_its_exit_code(fleet: Fleet) -> None:
    ref, ranks, supervisor, launcher = two_ranks(fleet)
    with stopped(supervisor):
        os.kill(launcher.pid, signal.SIGSTOP)
        ranks[1].kill()
        eventually(lambda: all_gone(ranks))
    error = failed(fleet, ref)
    assert (error.type, error.rank) == ("RankDied", 1)
    assert "ended before its work was done" in error.message
    assert "raised RuntimeError" in error.message


@pytest.mark.slow
def test_a_killed_torchrun_is_the_cause_of_the_end_of_its_ranks(fleet: Fleet) -> None:
    ref, _, _, launcher = two_ranks(fleet)
    launcher.kill()
    error = failed(fleet, ref)
    assert (error.type, error.rank) == ("LaunchFailed", None)
    assert "torchrun was ended by SIGKILL" in error.message


@pytest.mark.slow
def test_who_kills_the_supervisor_after_a_rank_has_ended_the_whole_part(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that ends an allocation kills its processes in any order."""
    settles = tmp_path / "settles"
    monkeypatch.setenv("TEST_SETTLES", str(settles))
    ref = fleet.submit("endless")
    program = str(Path(__file__).parents[1] / "helpers" / "settling_supervisor.py")
    supervisor = fleet.supervise(ref, command=(sys.executable, program))
    eventually(lambda: fleet.printed(ref, "working"))
    rank_process(ref, 0).kill()
    eventually(settles.exists)
    supervisor.kill()
    fleet.expire_lease(ref)
    fleet.store.attempts.reap()
    job = fleet.job(ref)
    assert (job.state, job.error) == ("queued", None)
    assert "queued again without using a retry" in (job.reason or "")


@pytest.mark.slow
def test_the_host_of_the_rank_that_was_killed_is_waited_for_in_a_gang(fleet: Fleet) -> None:
    fleet.slots = 1
    fleet.beat("beta")
    ref = fleet.submit("waiting", ranks=2, max_hosts=2)
    started = [fleet.supervise(replace(ref, host=share.host)) for share in fleet.job(ref).placement]
    eventually(lambda: sum("met the others" in event["line"] for event in fleet.events(ref, "log")) == 2)
    killed, other = rank_process(ref, 1), rank_process(ref, 0)
    owner = next(
        each for each in (psutil.Process(one.pid) for one in started) if killed in each.children(recursive=True)
    )
    with stopped(owner):
        killed.kill()
        eventually(lambda: is_gone(other))
    error = failed(fleet, ref)
    assert (error.type, error.rank) == ("RankDied", 1)
    assert "was killed by SIGKILL" in error.message


@pytest.mark.slow
@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["short leases"])
def test_a_host_that_dies_with_all_of_its_part_costs_a_gang_no_retry(fleet: Fleet) -> None:
    """The ranks elsewhere see broken connections long before its lease is over, and are not to blame."""
    fleet.slots = 1
    fleet.beat("beta")
    ref = fleet.submit("waiting", ranks=2, max_hosts=2)
    parts = [replace(ref, host=share.host) for share in fleet.job(ref).placement]
    started = {part.host: fleet.supervise(part) for part in parts}
    eventually(lambda: sum("met the others" in event["line"] for event in fleet.events(ref, "log")) == 2)
    other, dying = rank_process(ref, 0), rank_process(ref, 1)
    host = next(name for name, each in started.items() if dying in family(each))
    group = family(started[host])
    started[host].kill()
    for process in group:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    eventually(lambda: is_gone(other))

    def decided() -> Job | None:
        fleet.store.attempts.reap()
        return job if (job := fleet.job(ref)).state != "running" else None

    job = eventually(decided)
    assert (job.state, job.error) == ("queued", None)
    assert "queued again without using a retry" in (job.reason or "")
