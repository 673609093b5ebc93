"""What the ranks of a job can reach of the host that runs them (B6)."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confined import enforce, needs_files, needs_namespaces
from lanes import first_fast
from waiting import eventually
from worker_fleet import Fleet

from workers.launcher import confinement
from workers.launcher.confinement import Confinement, JobLimits
from workers.supervisor.job_policy import JobPolicy

ROOT = Path(__file__).parents[3]


def look_around(fleet: Fleet, tries: dict[str, tuple[str, Any]], policy: JobPolicy | None = None) -> dict[str, str]:
    """What came of ``tries`` in a rank of a job under ``policy``."""
    ref = fleet.submit("look_around")
    root = fleet.data.job(ref.job_id).root
    root.mkdir(parents=True, exist_ok=True)
    (root / "tries.json").write_text(json.dumps(tries))
    fleet.supervise(ref, policy=policy)
    job = eventually(lambda: (job := fleet.job(ref)).ended_at is not None and job)
    assert job.result is not None, job.error
    return dict(job.result["found"])


@pytest.mark.distributed
@needs_files
def test_ranks_read_and_write_the_files_of_their_own_job_only(fleet: Fleet, tmp_path: Path) -> None:
    other = fleet.data.job("job_of_another")
    mine = fleet.submit("nothing")
    fleet.store.jobs.cancel(mine.job_id)
    for path in (other.artifacts / "model.bin", fleet.data.root / "admin.key", tmp_path / "notes"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hush")
    found = look_around(
        fleet,
        {
            "another job's": ("read", str(other.artifacts / "model.bin")),
            "the admin key": ("read", str(fleet.data.root / "admin.key")),
            "the user's": ("read", str(tmp_path / "notes")),
            "the supervisor's environment": ("read", f"/proc/{os.getpid()}/environ"),
            "into the installation": ("write", str(ROOT / "workers" / "planted.py")),
            "into the shared folder": ("write", "/tmp/planted"),
            "into another job": ("write", str(other.artifacts / "planted")),
            "shared memory": ("write", f"/dev/shm/trivet-{os.getpid()}"),
            "a compiler": ("read", "/usr/bin/env"),
        },
    )
    Path(f"/dev/shm/trivet-{os.getpid()}").unlink(missing_ok=True)
    allowed = {name for name, what in found.items() if what == "ok"}
    assert allowed == {"shared memory", "a compiler"}, found
    assert not (ROOT / "workers" / "planted.py").exists()


@pytest.mark.distributed
@needs_files
def test_ranks_write_nothing_that_the_service_reads_by_its_name(fleet: Fleet) -> None:
    """Neither what it serves, nor its record of the attempt, nor where the next attempt will be."""
    ref = fleet.submit("look_around")
    paths = fleet.data.job(ref.job_id)
    paths.root.mkdir(parents=True)
    tries = {
        "a published file": ("write", str(paths.published / "0")),
        "the published folder": ("remove folder", str(paths.published)),
        "the next attempt": ("link", str(paths.attempt(2))),
        "beside the attempts": ("link", str(paths.root / "linked")),
        "the artifacts' folder": ("remove folder", str(paths.artifacts)),
        "the log": ("write", str(paths.attempt(1) / "log.rank-0.jsonl")),
        "the log's name": ("remove", str(paths.attempt(1) / "log.rank-0.jsonl")),
        "the record's name": ("remove", str(paths.attempt(1) / "events.jsonl")),
        "its events' name": ("remove", str(paths.attempt(1) / "events.rank-0.jsonl")),
        "another log": ("link", str(paths.attempt(1) / "log.rank-0.000000000000009.jsonl")),
        "the spec": ("write", str(paths.attempt(1) / "spec.json")),
        "the launcher's output": ("remove beside the socket", "launcher.log"),
        "an artifact": ("write", str(paths.artifacts / "new")),
        "a checkpoint": ("write", str(paths.checkpoints / "new")),
        "its work folder": ("write", str(paths.work(1) / "new")),
    }
    (paths.root / "tries.json").write_text(json.dumps(tries))
    fleet.supervise(ref)
    job = fleet.ended(ref)
    assert job.result is not None, job.error
    found = job.result["found"]
    assert {name for name, what in found.items() if what == "ok"} == {
        "an artifact", "a checkpoint", "its work folder",
    }, found  # fmt: skip


LIMITS = JobLimits(memory_gib=2.0, file_gib=1 / 512)


def look_at_sockets_and_limits(fleet: Fleet, isolation: confinement.Mode) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return look_around(
            fleet,
            {
                "broker": ("connect", fleet.url.removeprefix("unix://")),
                "port": ("connect to port", listening.getsockname()[1]),
                "data": ("list", str(fleet.data.root)),
                "privileges": ("status", "NoNewPrivs"),
                "capabilities": ("status", "CapEff"),
                "core": ("limit", "RLIMIT_CORE"),
                "memory": ("allocate", 3 << 30),
                "file": ("write much", str(fleet.data.cache / "large")),
                "supervisor": ("signal", os.getpid()),
            },
            JobPolicy(isolation, LIMITS),
        )


def assert_limited(found: dict[str, str]) -> None:
    assert (found["privileges"], found["core"]) == ("1", "0")
    assert (found["memory"], found["file"]) == ("MemoryError", "OSError")


@pytest.mark.distributed
@needs_namespaces
def test_confined_ranks_are_limited_and_see_neither_the_broker_nor_the_hosts_ports(fleet: Fleet) -> None:
    found = look_at_sockets_and_limits(fleet, "auto")
    assert_limited(found)
    assert found["broker"] == "FileNotFoundError"
    assert found["port"] == "ConnectionRefusedError"
    assert "hosts" not in found["data"]
    assert int(found["capabilities"], 16) == 0


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_that_nothing_confines_are_limited_all_the_same(fleet: Fleet) -> None:
    found = look_at_sockets_and_limits(fleet, "none")
    assert_limited(found)
    assert (found["broker"], found["port"]) == ("ok", "ok"), "they are there: only the confinement hides them"


@needs_namespaces
def test_a_process_that_forks_without_end_stops_at_its_limit() -> None:
    """As an ordinary user: the kernel limits no processes of root."""
    before = """
import ctypes, os
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # whose own files in /proc are its own again
"""
    code = """
children = []
try:
    while len(children) < 200:
        if (child := os.fork()) == 0:
            signal.pause()
        children.append(child)
except BlockingIOError:
    print("refused after", len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
    limited = Confinement(mode="none", limits=JobLimits(processes=64))
    script = (
        "import json, signal, sys\n"
        "from workers.launcher import namespaces\n"
        "from workers.launcher.confinement import Confinement\n"
        f"fields = json.loads({json.dumps(limited.to_json())!r})\n"
        f"{before}"
        "Confinement.from_json(fields).enforce(in_user_namespace=namespaces.enter_user_namespace())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "refused after 63\n", done.stderr


@needs_files
def test_secrets_below_a_granted_folder_stay_closed(tmp_path: Path) -> None:
    for name in ("package/code.py", "package/data/admin.key", "package/data/jobs/1/mine", "package/trivet.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    package = tmp_path / "package"
    secret = (str(package / "data"), str(package / "trivet.toml"))
    confined = Confinement("auto", read=(str(package),), write=(str(package / "data/jobs/1"),), secret=secret)
    code = f"""
import os
from pathlib import Path
root = Path({str(package)!r})
for name in ("code.py", "data/jobs/1/mine", "data/admin.key", "trivet.toml"):
    try:
        print(name, (root / name).read_text())
    except PermissionError:
        print(name, "closed")
print(sorted(os.listdir(root)))
(root / "data/jobs/1/new").write_text("y")
"""
    done = enforce(confined, code)
    assert done.stdout.splitlines() == [
        "code.py x", "data/jobs/1/mine x", "data/admin.key closed", "trivet.toml closed",
        "['code.py', 'data', 'trivet.toml']",
    ], done.stderr  # fmt: skip
    assert (package / "data/jobs/1/new").read_text() == "y"


@needs_namespaces
def test_only_what_is_granted_is_found_in_covered_folders(tmp_path: Path) -> None:
    """Covered folders may lie in each other, as the broker's does in the data folder; a socket may be covered alone."""
    root = tmp_path / "data"
    names = ("broker/broker.sock", "jobs/1/mine", "jobs/1/deep/mine", "jobs/2/theirs", "files/ab/c", "files/ab/d")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (tmp_path / "other.sock").write_text("x")
    confined = Confinement(
        "auto",
        read=(str(root / "files/ab/c"), str(root / "jobs/1/deep"), str(root / "never made")),
        write=(str(root / "jobs/1"),),
        covered=tuple(str(path) for path in (root, root / "broker", tmp_path / "other.sock", tmp_path / "gone.sock")),
    )
    code = f"""
from pathlib import Path
print([name for name in {names!r} if Path({str(root)!r}, name).exists()])
print(Path({str(tmp_path / "other.sock")!r}).stat().st_size)
(Path({str(root)!r}) / "jobs/1/new").write_text("y")
"""
    done = enforce(confined, code)
    assert done.stdout.splitlines() == ["['jobs/1/mine', 'jobs/1/deep/mine', 'files/ab/c']", "0"], done.stderr
    assert (root / "jobs/1/new").read_text() == "y"
    assert (root / "broker/broker.sock").read_text() == "x"


@needs_files
@pytest.mark.parametrize("named", first_fast(1, ["artifacts/deep", "artifacts", "theirs"]))
def test_what_a_spec_names_is_not_granted_where_a_link_stands_in_its_place(tmp_path: Path, named: str) -> None:
    """A job that the spec names may have laid it: nothing behind it is granted, and the error names it."""
    data, job = tmp_path / "data", tmp_path / "data" / "jobs" / "1"
    job.mkdir(parents=True)
    (data / "broker" / "deep").mkdir(parents=True)
    (job / "artifacts").symlink_to(data / "broker")
    (job / "theirs").symlink_to("/etc")
    confined = Confinement("auto", read=(str(job / named),), covered=(str(data),), secret=(str(data),))
    done = enforce(confined, "print('it runs')")
    assert done.returncode != 0
    assert "it runs" not in done.stdout
    assert f"{job / named}, which a job was to use, leads over a link" in done.stderr


def test_code_of_a_jobs_author_does_not_run_where_a_part_that_it_needs_does_not_hold(tmp_path: Path) -> None:
    confined = Confinement("auto", needs=("files", "network"), own_network=False, write=(str(tmp_path),))
    done = enforce(confined, "print('it runs')")
    assert "it runs" not in done.stdout
    assert "the job brings code of its own, and this host does not allow: " in done.stderr
    assert "a network of its own" in done.stderr


@needs_files
def test_what_is_granted_is_what_was_held_whatever_its_path_leads_to(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from workers.launcher import landlock, namespaces
root = Path({str(tmp_path)!r})
(root / "named").mkdir()
(root / "named" / "file").write_text("theirs")
(root / "secret").mkdir()
(root / "secret" / "file").write_text("hush")
with landlock.held([root / "named"], [root]) as held:
    (root / "named").rename(root / "moved")
    (root / "named").symlink_to(root / "secret")
    landlock.restrict([Path("/usr"), *held], [])
print((root / "moved" / "file").read_text())
try:
    print((root / "named" / "file").read_text())
except PermissionError:
    print("closed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["theirs", "closed"], done.stderr


@needs_namespaces
def test_a_confined_process_cannot_undo_what_hides_the_broker(tmp_path: Path) -> None:
    (tmp_path / "data" / "broker").mkdir(parents=True)
    (tmp_path / "data" / "broker" / "broker.sock").touch()
    confined = Confinement("auto", covered=(str(tmp_path / "data"),), own_network=True)
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.umount2({str(tmp_path / "data")!r}.encode(), 2), libc.unshare(0x00020000), libc.unshare(0x10000000) and "")
print(os.path.exists({str(tmp_path / "data/broker/broker.sock")!r}))
"""
    done = enforce(confined, code)
    assert done.stdout.split()[0] == "-1", done.stderr
    assert done.stdout.split()[1] == "-1"
    assert done.stdout.split()[-1] == "False"


@needs_namespaces
def test_sockets_of_other_services_are_covered_but_for_those_that_are_granted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "granted").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as docker, socket.socket(socket.AF_UNIX) as granted:
        for listening, path in ((docker, run / "docker.sock"), (granted, run / "granted" / "socket")):
            listening.bind(str(path))
            listening.listen()
        code = f"""
import socket
for path in ({str(run / "docker.sock")!r}, {str(run / "granted/socket")!r}):
    with socket.socket(socket.AF_UNIX) as client:
        print(client.connect_ex(path))
"""
        cover = f"""
from pathlib import Path
from workers.launcher import confinement
confinement._SOCKETS = (Path({str(run)!r}),)
"""
        confined = Confinement("auto", read=(str(run / "granted"),))
        assert enforce(confined, code, before=cover).stdout.split() == [str(errno.ENOENT), "0"]
        nowhere = cover.replace(str(run), str(tmp_path / "nowhere"))
        assert enforce(confined, code, before=nowhere).stdout.split() == ["0", "0"], "only that cover hides it"
