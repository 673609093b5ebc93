"""Only the ranks of a group speak for themselves on its event socket (B6)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually
from worker_fleet import Fleet, rank_process

from service.jobs.events import MalformedEvent
from service.jobs.runtime import connect
from workers.event_protocol import Greeting
from workers.supervisor.rank_socket import Admission, is_descendant


def check(admission: Admission, rank: int = 2, pid: int | None = None, secret: str = "s3cret") -> None:
    admission.check(Greeting(rank, "control", secret), pid or os.getpid())


def test_a_process_speaks_for_one_rank_of_its_own_host() -> None:
    admission = Admission("s3cret", range(2, 4), os.getppid())
    check(admission)
    check(admission)
    with pytest.raises(MalformedEvent, match="the ranks of this host are 2 to 3"):
        check(admission, rank=77)
    with pytest.raises(MalformedEvent, match="does not know the secret"):
        check(admission, rank=3, secret="s3cre")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        with pytest.raises(MalformedEvent, match=f"that rank is process {os.getpid()}"):
            check(admission, pid=peer.pid)
        check(admission, rank=3, pid=peer.pid)
        peer.communicate()


def test_a_process_of_another_group_is_refused() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert is_descendant(other.pid, os.getpid())
        assert not is_descendant(os.getpid(), other.pid)
        with pytest.raises(MalformedEvent, match="not started by this group's supervisor"):
            check(Admission("s3cret", range(2, 4), other.pid))
        other.communicate()
    assert is_descendant(other.pid, os.getpid()), "of one that has ended nothing is known, and its secret was right"


@pytest.mark.distributed
def test_a_stranger_that_calls_itself_rank_77_or_0_is_not_heard(fleet: Fleet) -> None:
    """The stranger knows the secret, as one could who reads the environment of ranks that nothing confines."""
    ref = fleet.submit("until_told")
    fleet.supervise(ref)
    eventually(lambda: fleet.events(ref, "metric"))
    variables = rank_process(ref, 0).environ()
    line = b'{"type": "error", "error": "Forged", "message": "", "traceback": ""}\n{"type": "done"}\n'
    for number, secret in ((77, variables["TRIVET_EVENTS_SECRET"]), (0, variables["TRIVET_EVENTS_SECRET"]), (0, "x")):
        connection = connect(variables["TRIVET_EVENTS"], number, "control", secret)
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hung up on already
            connection.sendall(line)
    eventually(lambda: fleet.printed(ref, "does not know the secret"))
    assert fleet.printed(ref, "which calls itself rank 77, is ignored: the ranks of this host are 0 to 0")
    assert fleet.printed(ref, "not started by this group's supervisor")
    assert not any(variables["TRIVET_EVENTS_SECRET"] in event["line"] for event in fleet.events(ref, "log"))
    (Path(fleet.data.job(ref.job_id).root) / "go").touch()
    assert fleet.ended(ref).state == "succeeded"
    assert fleet.events(ref, "error") == []
