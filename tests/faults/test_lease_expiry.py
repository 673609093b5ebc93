"""No two attempts of a job at once: a group whose lease was not renewed ends, whoever of its processes does not run."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import worker_fleet
from waiting import LIMIT_S, eventually
from worker_fleet import SHORT_LEASES, Fleet, MortalBroker, all_gone, family, is_called, processes_of

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef
from service.jobs.store import StoreLimits
from service.linux import uptime
from workers.event_protocol import STOP, lease_until
from workers.supervisor import keeper

pytestmark = pytest.mark.waits

LOYAL = "from service.linux import die_with_parent; die_with_parent(); import time; time.sleep(3600)"
ON_A_HANGING_DISK = (sys.executable, str(Path(worker_fleet.__file__).with_name("hanging_disk_supervisor.py")))
DAEMON = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '3600']); time.sleep(3600)"


def kept(program: str) -> tuple[subprocess.Popen[bytes], int]:
    """A keeper with a Python program behind it, and the pipe through which it is told how long that may run."""
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", keeper.__file__, str(reader), sys.executable, "-c", program]
    process = subprocess.Popen(command, pass_fds=(reader,))
    os.close(reader)
    eventually(lambda: psutil.Process(process.pid).children())
    return process, writer


def unread(descriptor: int) -> int:
    """Bytes that were written to a pipe and that its other end has not read."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_keeper_ends_everything_when_its_time_has_come() -> None:
    process, writer = kept(DAEMON)
    eventually(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2)
    below = psutil.Process(process.pid).children(recursive=True)
    os.write(writer, b"%f\n" % (uptime() + 3600))
    eventually(lambda: unread(writer) == 0)
    assert process.poll() is None
    os.write(writer, b"%f\n%f\n" % (uptime() + 3600, uptime() + 0.5))
    assert process.wait(LIMIT_S) == -signal.SIGTERM, "so that nobody takes the command for what ended"
    assert all_gone(below)
    os.close(writer)


@pytest.mark.slow
def test_a_keeper_that_is_stopped_dies_when_its_time_has_come_and_its_group_with_it() -> None:
    process, writer = kept(LOYAL)
    below = psutil.Process(process.pid).children(recursive=True)
    os.write(writer, b"%f\n" % (uptime() + 3.0))
    eventually(lambda: unread(writer) == 0 and psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    process.send_signal(signal.SIGSTOP)
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    eventually(lambda: all_gone(below))
    os.close(writer)


@pytest.fixture
def rank() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process with the control thread of a rank, and its supervisor's end of the connection."""
    ours, theirs = socket.socketpair()
    program = f"""
import socket, time
from workers.rank.program import Control
control = Control(socket.socket(fileno={theirs.fileno()}), lambda: None)
print("ready", flush=True)
control.stop.wait()
print("stopping", flush=True)
time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process, ours
    process.kill()
    process.wait()
    ours.close()
    theirs.close()


def unsent(connection: socket.socket) -> int:
    """Bytes that the other end has not read."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_a_rank_kills_itself_when_its_lease_ends(rank: tuple[subprocess.Popen[bytes], socket.socket]) -> None:
    process, supervisor = rank
    supervisor.sendall(lease_until(uptime() + 3600) + lease_until(uptime() + 1.0))
    assert process.wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.slow
def test_a_rank_that_could_not_run_looks_for_a_longer_lease_first(
    rank: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    process, supervisor = rank
    until = uptime() + 3.0
    supervisor.sendall(lease_until(until))
    eventually(lambda: unsent(supervisor) == 0 and psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: uptime() > until)
    supervisor.sendall(lease_until(uptime() + 3600) + STOP)
    process.send_signal(signal.SIGCONT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"stopping\n"
    assert process.poll() is None


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stopped", "limits"),
    [
        pytest.param(1, SHORT_LEASES, id="supervisor", marks=pytest.mark.slow),
        pytest.param(2, StoreLimits(lease_s=5.0), id="supervisor and keeper"),
    ],
)
def test_ranks_are_gone_before_their_attempt_is_given_away_although_nobody_else_runs(
    fleet: Fleet, stopped: int
) -> None:
    """A supervisor that comes back reports a loss and no failure: the kernel ended the group, not the job."""
    ref = fleet.submit("endless", ranks=2)
    supervisor = fleet.supervise(ref)
    eventually(lambda: fleet.printed(ref, "working"))
    for process in [psutil.Process(supervisor.pid), family(supervisor)[0]][:stopped]:
        process.send_signal(signal.SIGSTOP)
    eventually(fleet.store.attempts.reap)
    assert [each for each in processes_of(ref) if not is_called(each, "sleep")] == []
    supervisor.send_signal(signal.SIGCONT)
    assert supervisor.wait(LIMIT_S) == 0
    job = fleet.job(ref)
    assert (job.state, job.attempt) == ("queued", 1)
    assert "lease" in (job.reason or "")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "limits",
    [StoreLimits(lease_s=60.0), pytest.param(SHORT_LEASES, marks=pytest.mark.slow)],
    ids=["given away", "over"],
)
def test_work_that_was_done_when_its_lease_ended_is_a_success(fleet: Fleet) -> None:
    """Whether the store gave the lease away before its time, or it was over for the supervisor too."""
    ref = fleet.submit("until_told")
    supervisor = fleet.supervise(ref)
    eventually(lambda: fleet.events(ref, "metric"))
    group = family(supervisor)
    supervisor.send_signal(signal.SIGSTOP)
    (fleet.data.job(ref.job_id).root / "go").touch()
    eventually(lambda: all_gone(group))
    if fleet.limits != SHORT_LEASES:
        fleet.expire_lease(ref)
    assert eventually(fleet.store.attempts.reap) == [ref.job_id]
    supervisor.send_signal(signal.SIGCONT)
    fleet.expect_every_step(ref)
    assert supervisor.wait(LIMIT_S) == 0


def freeze(data: DataLayout, ref: AttemptRef) -> Path:
    """Make whoever writes to the attempt's folder hang, until the file that is returned is gone."""
    mark = data.job(ref.job_id).attempt(1) / "hangs"
    mark.parent.mkdir(parents=True)
    mark.touch()
    return mark


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["time to renew"])
def test_a_job_whose_folder_hangs_keeps_its_lease_and_goes_on_afterwards(fleet: Fleet) -> None:
    ref = fleet.submit("counting")
    mark = freeze(fleet.data, ref)
    supervisor = fleet.supervise(ref, command=ON_A_HANGING_DISK)
    eventually(lambda: processes_of(ref))
    until = time.monotonic() + 1.25 * fleet.limits.lease_s
    while time.monotonic() < until:
        assert fleet.store.attempts.reap() == []
        time.sleep(0.2)
    assert fleet.job(ref).state == "running"
    mark.unlink()
    job = fleet.ended(ref)
    assert (job.state, job.attempt) == ("succeeded", 1)
    assert [event["step"] for event in fleet.events(ref, "metric")] == list(range(1, 201))
    assert supervisor.wait(LIMIT_S) == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["ends"])
def test_a_group_ends_itself_although_its_folder_and_the_broker_hang(outage: Fleet, mortal: MortalBroker) -> None:
    ref = outage.submit("endless")
    mark = freeze(outage.data, ref)
    supervisor = outage.supervise(ref, command=ON_A_HANGING_DISK)
    eventually(lambda: processes_of(ref))
    ours = family(supervisor)
    with mortal.hanging():
        eventually(lambda: all_gone(ours))
        assert supervisor.poll() is None
    mark.unlink()
    supervisor.kill()
