"""Scripts of jobs' authors: a real broker, real supervisors, real groups on gloo."""

from __future__ import annotations

import dataclasses
import io
import signal
import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from waiting import eventually
from worker_fleet import REAL_SUPERVISOR, SHORT_LEASES, Fleet, train_spec

from service.jobs.records import AttemptRef
from service.jobs.spec.script import ScriptSpec
from service.jobs.store import StoreLimits
from trivet.packing import pack_folder
from workers.supervisor.job_policy import JobPolicy

EXAMPLE = ROOT / "examples" / "script"


@pytest.fixture
def limits() -> StoreLimits:
    """Leases whose renewal soon tells a supervisor of an order, and room for urgent jobs at once."""
    return dataclasses.replace(SHORT_LEASES, preemption_min_run_s=0.0)


pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("confined")]

ODD = """
import os, socket, subprocess, sys, threading, time
from pathlib import Path
from trivet import run

if os.fork() == 0:
    raise RuntimeError("a fork that runs past the script's end")
os.wait()
sys.stdout.buffer.write(bytes(range(256)) + b"\\n")
reached = 0
for folder in (Path("/tmp"), Path(os.environ["TRIVET_DATA"]), run.checkpoint_dir().parents[1]):
    try:
        (folder / "planted").write_text("x")
        reached += 1
    except OSError:
        pass
with socket.socket() as connection:
    reached += connection.connect_ex(("127.0.0.1", int(sys.argv[1]))) == 0
child = "from trivet import run; run.metric(1, of_a_child=7)"
outer = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
subprocess.run([sys.executable, "-c", child], check=True, env=outer)
(run.checkpoint_dir() / "state").write_text("1")
Path("out").mkdir()
Path("out/a.txt").write_text("kept")
Path("out/link.txt").symlink_to("/etc/passwd")
run.artifact("out", "copied")
run.metric(2, {"reached": reached}, words=len(sys.argv))
threading.Thread(target=lambda: (time.sleep(0.3), run.metric(3, late=1.0))).start()
"""
LATE = """
import os, time
from pathlib import Path
rank = os.environ["RANK"]
time.sleep(float(rank))
Path(f"shard-{rank}").write_text(rank)
"""
FAILING = """
from trivet import run
if not run.resumed():
    (run.checkpoint_dir() / "state").write_text("from the first attempt")
    raise SystemExit(3)
run.metric(1, went_on=float((run.checkpoint_dir() / "state").read_text() == "from the first attempt"))
"""
STOPPING = """
import time
from trivet import run
state = run.checkpoint_dir() / "state"
run.metric(1, begun=1, went_on=float(run.resumed() and state.read_text() == "where it was"))
while not run.stopping() and not run.resumed():
    time.sleep(0.02)
state.write_text("where it was")
print("stopped by itself")
"""


def placed(fleet: Fleet, files: dict[str, str] | Path, **fields: Any) -> AttemptRef:
    """A job of a script that is placed here, by a project that may run scripts."""
    content = io.BytesIO()
    if isinstance(files, Path):
        pack_folder(files, content)
    else:
        with zipfile.ZipFile(content, "w") as zipped:
            for name, text in files.items():
                zipped.writestr(name, text)
    content.seek(0)
    stored = fleet.store.files.add(content, "application/zip").id
    fleet.store.projects.change("default", scripts=True)
    given = {"archive": stored, "entry": "train.py", "device": "cpu", **fields}
    return fleet.place(ScriptSpec.model_validate(given))


def test_the_example_trains_on_two_ranks_as_it_is(fleet: Fleet) -> None:
    ref = placed(fleet, EXAMPLE, args=["--epochs", 2, "--width", 4], ranks=2, keep=["out/*.pt"])
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    job = fleet.ended(ref)
    assert (job.state, job.error) == ("succeeded", None)
    assert job.result is not None
    assert set(job.result) == {"seconds", "loss", "accuracy"}
    assert job.result["accuracy"] > 0.5
    assert job.progress is not None
    assert (job.progress.done, job.progress.total, job.progress.unit) == (2, 2, "epochs")
    curve = fleet.events(ref, "metric")
    assert [(event["step"], event["rank"]) for event in curve] == [(1, 0), (2, 0)]
    assert curve[1]["values"]["loss"] < curve[0]["values"]["loss"]
    assert [artifact.name for artifact in fleet.store.artifacts.list(ref.job_id)] == ["out/model.pt"]
    assert fleet.printed(ref, "epoch 2: loss")


def test_a_script_that_does_odd_things_harms_nobody_and_keeps_what_it_says(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        ref = placed(fleet, {"train.py": ODD}, args=[port, "b"], keep=["out/**", "out"])
        fleet.supervise(ref, command=REAL_SUPERVISOR)
        job = fleet.ended(ref)
    assert (job.state, job.error) == ("succeeded", None)
    assert job.result is not None
    del job.result["seconds"]
    assert job.result == {"reached": 0.0, "words": 3.0, "late": 1.0}
    values = [event["values"] for event in fleet.events(ref, "metric")]
    assert values == [{"of_a_child": 7.0}, {"reached": 0.0, "words": 3.0}, {"late": 1.0}]
    kept = {artifact.name for artifact in fleet.store.artifacts.list(ref.job_id)}
    assert kept == {"copied", "out/a.txt"}
    assert fleet.printed(ref, "nothing is kept by 'out': it matches no file in the script's folder")
    assert not fleet.printed(ref, "nothing is kept by 'out/**'")
    assert fleet.printed(ref, "a fork that runs past the script's end")
    assert not Path("/tmp/planted").exists()
    assert not (fleet.data.root / "planted").exists()


def test_what_the_last_rank_writes_is_kept_as_well(fleet: Fleet) -> None:
    ref = placed(fleet, {"train.py": LATE}, ranks=2, keep=["shard-*"])
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    assert fleet.ended(ref).state == "succeeded"
    assert {artifact.name for artifact in fleet.store.artifacts.list(ref.job_id)} == {"shard-0", "shard-1"}


def assert_goes_on(fleet: Fleet, ref: AttemptRef) -> None:
    """The next attempt succeeds, from where the first one stopped."""
    assert fleet.store.attempts.place() == [ref.job_id]
    fleet.supervise(AttemptRef(ref.job_id, 2, ref.host), command=REAL_SUPERVISOR)
    job = fleet.ended(ref)
    assert job.state == "succeeded"
    assert job.result is not None
    assert job.result["went_on"] == 1.0


def test_a_script_goes_on_from_what_its_failed_attempt_left(fleet: Fleet) -> None:
    ref = placed(fleet, {"train.py": FAILING}, retries=1)
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    eventually(lambda: fleet.job(ref).state == "queued")
    error = next(event for event in fleet.events(ref, "error"))
    assert (error["error"], error["message"]) == ("ScriptExit", "the script ended with exit code 3")
    assert_goes_on(fleet, ref)


def test_a_script_that_is_told_to_stop_ends_by_itself_and_is_queued_again(fleet: Fleet) -> None:
    ref = placed(fleet, {"train.py": STOPPING})
    supervisor = fleet.supervise(ref, command=REAL_SUPERVISOR)
    eventually(lambda: fleet.events(ref, "metric"))
    supervisor.send_signal(signal.SIGINT)  # as when the service on its host stops
    eventually(lambda: fleet.job(ref).state != "running")
    assert fleet.job(ref).state == "queued"
    assert fleet.printed(ref, "stopped by itself")


def test_a_script_makes_room_for_a_job_of_higher_priority_and_goes_on_after_it(fleet: Fleet) -> None:
    fleet.slots = 1
    ref = placed(fleet, {"train.py": STOPPING}, preemptible=True)
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    eventually(lambda: fleet.events(ref, "metric"))
    urgent, _ = fleet.store.jobs.submit(train_spec("urgent", priority=5), "tester")
    made = fleet.store.preemptions.make_room()
    assert made is not None
    assert [victim.id for victim in made.victims] == [ref.job_id]
    eventually(lambda: fleet.job(ref).state == "queued")
    assert fleet.printed(ref, "stopped by itself")
    assert [event["reason"] for event in fleet.events(ref, "state") if "preempted" in str(event.get("reason"))] == [
        f"attempt 1: preempted by job {urgent.id}; queued again"
    ]
    assert fleet.store.attempts.place() == [urgent.id]
    fleet.store.jobs.cancel(urgent.id)
    assert_goes_on(fleet, ref)


def test_a_script_without_an_end_is_ended_by_its_time_limit(fleet: Fleet) -> None:
    ref = placed(fleet, {"train.py": "while True:\n    pass\n"}, timeout_s=1.0)
    fleet.supervise(ref, grace_s=0.1, command=REAL_SUPERVISOR)
    job = fleet.ended(ref)
    assert job.error is not None
    assert job.error.message == "the attempt ran longer than timeout_s = 1"


def test_a_script_runs_in_confinement_or_not_at_all(fleet: Fleet) -> None:
    ref = placed(fleet, {"train.py": ""})
    claim = fleet.store.attempts.claim(ref, "supervisor")
    confined = JobPolicy("auto").confine(claim, fleet.data, "redis://127.0.0.1", read=[], write=[])
    assert set(confined.needs) == {"files", "broker", "network"}
    assert confined.own_network
