"""An attempt that hangs, a disk that fills up, a compiler that outlives its group: each ends, and it is said why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import worker_fleet
from waiting import LIMIT_S, eventually
from worker_fleet import HOST, SHORT_LEASES, SUPERVISOR, Fleet, processes_of, rank_process

from service.jobs.host import Process, SupervisorRegistry
from service.jobs.host.supervisor_registry import SupervisedAttempt
from service.jobs.records import JobError
from service.jobs.spec.train import TrainSpec
from workers.rank.stacks import innermost_frame

pytestmark = [pytest.mark.distributed, pytest.mark.waits]

WITHOUT_ROOM = (sys.executable, str(Path(worker_fleet.__file__).with_name("full_disk_supervisor.py")))


def failure(fleet: Fleet, behaviour: str, ranks: int = 1, **fields: object) -> JobError:
    ref = fleet.submit(behaviour, ranks, **fields)
    supervisor = fleet.supervise(ref)
    job = fleet.ended(ref)
    assert job.state == "failed"
    assert job.error is not None
    assert processes_of(ref) == []
    assert supervisor.wait(LIMIT_S) == 0
    return job.error


@pytest.mark.slow
def test_ranks_that_hang_are_ended_after_the_stall_limit_and_say_where_they_are(fleet: Fleet) -> None:
    ref = fleet.submit("deadlocked", 2, stall_s=3.0)
    fleet.supervise(ref)
    job = fleet.ended(ref)
    assert job.error is not None
    assert (job.state, job.error.type) == ("failed", "Stalled")
    assert "stall_s = 3 s: rank 0 is at " in job.error.message
    assert "rank 1 is at wait_for_a_lock (fake_rank.py:" in job.error.message
    assert processes_of(ref) == []
    stacks = fleet.store.artifacts.read(ref.job_id, "errors/attempt-1-rank-1.txt", 1 << 20)
    assert b"in wait_for_a_lock" in stacks


@pytest.mark.slow
def test_ranks_that_hang_are_given_another_attempt_where_there_is_a_retry(fleet: Fleet) -> None:
    ref = fleet.submit("deadlocked", 2, stall_s=3.0, retries=1)
    fleet.supervise(ref)
    eventually(lambda: fleet.job(ref).state == "queued")
    reason = fleet.job(ref).reason or ""
    assert "retry 1 of 1" in reason
    assert "stall_s" in reason


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_said_not_to_answer(fleet: Fleet) -> None:
    ref = fleet.submit("until_told", stall_s=8.0)
    fleet.supervise(ref)
    eventually(lambda: fleet.events(ref, "metric"))
    rank_process(ref, 0).send_signal(signal.SIGSTOP)
    error = fleet.ended(ref).error
    assert error is not None
    assert (error.type, error.rank) == ("Stalled", 0)
    assert "it did not answer, like a process that is stopped" in error.message


def test_the_stall_limit_is_an_hour_unless_the_spec_says_otherwise() -> None:
    fields = {"model": {"family": "mlp", "in_features": 1, "hidden": [1], "out_features": 1}, "steps": 1}
    data = {"data": {"source": "digits"}}
    assert TrainSpec.model_validate({**fields, **data}).stall_s == 3600
    assert TrainSpec.model_validate({**fields, **data, "stall_s": None}).stall_s is None
    with pytest.raises(ValueError, match="stall_s"):
        TrainSpec.model_validate({**fields, **data, "stall_s": 0})


def test_the_place_of_a_hang_is_that_of_the_main_thread() -> None:
    stacks = """Thread 0x1 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Current thread 0x2 (most recent call first):
  File "/app/training/loop.py", line 12 in step
  File "/app/training/loop.py", line 40 in train
"""
    assert innermost_frame(stacks) == "step (loop.py:12)"
    assert innermost_frame("").startswith("an unknown place")


@pytest.mark.slow
def test_a_disk_that_a_rank_fills_is_said_with_path_and_free_bytes(fleet: Fleet) -> None:
    error = failure(fleet, "writing")
    assert (error.type, error.rank) == ("DiskFull", 0)
    assert "no space left on the disk of " in error.message
    assert error.message.endswith("bytes are free")


@pytest.mark.parametrize(
    ("name", "behaviour", "supervisor"),
    [
        pytest.param("events.rank-0.jsonl", "writing_its_events", SUPERVISOR, id="rank", marks=pytest.mark.slow),
        pytest.param("log.rank-0.jsonl", "endless", WITHOUT_ROOM, id="supervisor"),
    ],
)
def test_a_disk_without_room_for_the_record_ends_the_attempt_and_says_so(
    fleet: Fleet, name: str, behaviour: str, supervisor: tuple[str, ...]
) -> None:
    """The rank writes its own events, the supervisor what the rank prints."""
    ref = fleet.submit(behaviour)
    folder = fleet.data.job(ref.job_id).attempt(1)
    fleet.supervise(ref, command=supervisor)
    error = fleet.ended(ref).error
    assert error is not None
    assert error.type == "DiskFull"
    assert f"no space left on the disk of {folder / name}" in error.message
    assert processes_of(ref) == []


@pytest.mark.slow
@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["told soon"])
def test_a_cancel_does_not_wait_for_what_nobody_could_read(fleet: Fleet) -> None:
    """Half a TiB of nothing, as an artifact: the ranks have ended when the cancel comes."""
    ref = fleet.submit("hoarding")
    supervisor = fleet.supervise(ref, grace_s=1.0)
    eventually(lambda: fleet.printed(ref, "it is all yours") and processes_of(ref) == [])
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(ref).state == "cancelled"
    assert supervisor.wait(LIMIT_S) == 0
    assert fleet.printed(ref, "some reports and artifacts of the ranks were not read")


@pytest.mark.slow
def test_pipes_in_the_place_of_files_hold_nothing_up(fleet: Fleet) -> None:
    """The rank's result takes the place of one; the other is no artifact."""
    ref = fleet.submit("piping")
    fleet.supervise(ref)
    assert fleet.ended(ref).state == "succeeded"
    assert fleet.printed(ref, "artifact 'pipe': ")
    assert fleet.store.artifacts.list(ref.job_id) == []


def test_a_host_that_cannot_write_to_its_own_folder_gives_the_part_back_and_says_why(fleet: Fleet) -> None:
    ref = fleet.submit("endless")
    fleet.data.host(HOST).parent.mkdir(parents=True)
    fleet.data.host(HOST).write_text("a file in the place of the folder")
    assert fleet.supervise(ref).wait(LIMIT_S) == 0
    job = fleet.job(ref)
    assert job.state == "queued"
    assert str(fleet.data.host(HOST)) in (job.reason or "")
    fleet.data.host(HOST).unlink()


def test_devices_are_not_free_while_a_compiler_of_a_lost_group_lives(fleet: Fleet) -> None:
    """Its supervisor and its keeper were killed, and nobody is left who would know of it but by its environment."""
    environment = os.environ | {"TRIVET_JOB": "job_orphaned", "TRIVET_ATTEMPT": "3"}
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    compiler = subprocess.Popen([sys.executable, "-c", ignores], env=environment, start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", ignores], env=environment | {"TRIVET_ATTEMPT": "4"})
    gone = Process(compiler.pid, "1")
    folder = fleet.data.host(HOST)
    folder.mkdir(parents=True)
    entry = SupervisedAttempt("job_orphaned:3", gone, gone, str(folder / "scratch"))
    fields = {"pid": gone.pid, "started": gone.started}
    text = f'{{"name": "{entry.name}", "supervisor": {fields}, "keeper": {fields}, "scratch": "{entry.scratch}"}}'
    (folder / "job_orphaned.3.json").write_text(text.replace("'", '"'))
    try:
        eventually(lambda: b"sleep" in (psutil.Process(compiler.pid).cmdline()[-1].encode()))
        assert SupervisorRegistry(folder).live() == ("job_orphaned:3",)
        assert compiler.wait(LIMIT_S) == -signal.SIGKILL
        assert SupervisorRegistry(folder).live() == ()
        assert other.poll() is None
    finally:
        for process in (compiler, other):
            process.kill()
            process.wait()
