"""Shared memory, GPUs, kernel settings and other processes, as confined ranks find them."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path

import pytest
import torch
from confined import AVAILABLE, enforce, needs_files, needs_namespaces
from worker_fleet import HOST, train_spec

from service.jobs.files import DataLayout
from service.jobs.host import ISOLATION_PARTS
from service.jobs.records import AttemptRef, Claim, HostShare
from workers.launcher import confinement, namespaces
from workers.launcher.confinement import Confinement, ConfinementError, JobLimits
from workers.supervisor.job_policy import JobPolicy
from workers.supervisor.settings import SupervisorOrder

SEGMENTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def segment(key, size):
    return libc.shmget(key, ctypes.c_size_t(size), 0o1600)
"""


@needs_namespaces
def test_shared_memory_is_a_groups_own_and_limited() -> None:
    """Neither files nor segments of the host are seen; what is left there is gone with the last process."""
    libc = ctypes.CDLL(None)
    key, mine = 0x54000000 + os.getpid() % 0xFFFFFF, Path(f"/dev/shm/trivet-test-{os.getpid()}")
    segment = libc.shmget(key, 4096, 0o1600)
    assert segment >= 0
    try:
        mine.write_text("hush")
        confined = Confinement("auto", JobLimits(memory_gib=1 / 8))
        code = f"""{SEGMENTS}
print(libc.shmget({key}, 0, 0), os.listdir("/dev/shm"))
print(segment({key + 1}, 64 << 20) >= 0, segment({key + 2}, 256 << 20) >= 0)
with open("/dev/shm/left-{os.getpid()}", "wb", buffering=0) as file:
    try:
        print(sum(file.write(bytes(1 << 20)) for _ in range(256)))
    except OSError as error:
        print(error.strerror)
"""
        done = enforce(confined, code)
        seen, limits, written = done.stdout.splitlines() or [done.stderr] * 3
        assert seen == "-1 []"
        assert limits.split() == ["True", str("memory" not in AVAILABLE)]
        assert written == "No space left on device"
        assert libc.shmget(key + 1, 0, 0) == -1
        assert not Path(f"/dev/shm/left-{os.getpid()}").exists()
    finally:
        mine.unlink(missing_ok=True)
        libc.shmctl(segment, 0, None)


@needs_files
@needs_namespaces
@pytest.mark.parametrize("cuda", [True, False])
def test_ranks_that_use_cuda_name_their_threads_and_write_nothing_else_below_proc(cuda: bool) -> None:
    """CUDA cannot be initialised where it may not name its threads."""
    code = """
import os, threading
from pathlib import Path
def tries(path):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    except OSError as error:
        return type(error).__name__ + " " + os.strerror(error.errno)
    return "ok"
thread = threading.Thread(target=lambda: names.append(tries(f"/proc/self/task/{threading.get_native_id()}/comm")))
names = []
thread.start()
thread.join()
print(*names)
settings = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/../sys/vm/drop_caches"]
settings = [path for path in settings if os.path.exists(path)]
print(all(tries(path) != "ok" for path in settings), bool(settings))
print(tries(f"/proc/{os.getppid()}/environ"), tries("/proc/1/environ"))
"""
    named, settings, others = enforce(Confinement("auto", cuda=cuda), code).stdout.splitlines()
    assert named == ("ok" if cuda else "PermissionError Permission denied")
    assert settings == "True True"
    assert "ok" not in others


def test_processes_that_end_meanwhile_are_no_kernel_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups start while others end, so that a folder of a process may be gone as soon as it was listed."""
    monkeypatch.setattr(Path, "iterdir", lambda proc: iter([proc / "4194399", proc / "sys"]))
    assert list(namespaces._kernel_settings()) == [Path("/proc/sys")]


@needs_files
def test_ranks_make_sockets_of_networks_and_of_no_other_family() -> None:
    """Those of virtual machines (40), for example, belong to no network namespace; io_uring would make them anyway."""
    code = """
import ctypes, errno, socket
def made(family, kind=socket.SOCK_STREAM):
    try:
        socket.socket(family, kind).close()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
print(made(40), made(38, socket.SOCK_SEQPACKET), made(socket.AF_UNIX), made(socket.AF_INET), made(socket.AF_INET6),
      made(socket.AF_NETLINK, socket.SOCK_RAW), len(socket.socketpair()))
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(425, 1, None), errno.errorcode[ctypes.get_errno()])
"""
    done = enforce(Confinement("auto"), code)
    assert done.stdout.splitlines() == ["EAFNOSUPPORT EAFNOSUPPORT ok ok ok ok 2", "-1 ENOSYS"], done.stderr


@needs_files
def test_ranks_read_the_systems_settings_and_no_passwords_or_keys() -> None:
    code = """
import pathlib, pwd, socket, ssl
def read(name):
    try:
        return bool(pathlib.Path("/etc", name).read_bytes() or True)
    except OSError as error:
        return type(error).__name__
print(read("passwd"), read("hosts"), read("shadow"), read("sudoers"), read("fstab"))
print(pwd.getpwuid(0).pw_name, socket.gethostbyname("localhost"), len(ssl.create_default_context().get_ca_certs()) >= 0)
"""
    done = enforce(Confinement("auto"), code)
    settings, used = done.stdout.splitlines() or [done.stderr] * 2
    assert settings.split()[:2] == ["True", "True"]
    assert {*settings.split()[2:]} <= {"PermissionError", "FileNotFoundError"}, settings
    assert used == "root 127.0.0.1 True"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_starts_in_confinement(tmp_path: Path) -> None:
    confined = Confinement("auto", write=(str(tmp_path),), own_network=True, cuda=True)
    done = enforce(confined, "import torch\nprint(torch.ones(3, device='cuda').sum().item())")
    assert done.stdout == "3.0\n", done.stderr


def test_ranks_on_a_gpu_are_confined_as_users_of_cuda(data: DataLayout, tmp_path: Path) -> None:
    for pool in ("cuda", "cpu"):
        shares = (HostShare(host=HOST, devices=(0,), pool=pool),)
        claim = Claim(AttemptRef("job_1", 1, HOST), train_spec("x"), shares, "127.0.0.1", 15.0)
        confined = JobPolicy("auto").confine(claim, data, "redis://127.0.0.1", read=[], write=[tmp_path])
        assert confined.cuda == (pool == "cuda")


@needs_files
def test_kernel_settings_that_could_be_changed_leave_files_open_rather_than_cuda_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Root in neither a namespace nor a container: then *files* does not hold, and ``required`` refuses the host."""
    monkeypatch.setattr(confinement, "_limit", lambda *_, **__: None)
    monkeypatch.setattr(confinement, "_may_change_kernel_settings", lambda: True)
    monkeypatch.setattr(confinement.namespaces, "drop_capabilities", lambda: None)
    monkeypatch.setattr(confinement, "leave_other_processes_alone", lambda: True)
    assert Confinement("auto", cuda=True).enforce(in_user_namespace=False) == {"limits"}
    with pytest.raises(ConfinementError, match="does not allow: ranks open"):
        Confinement("required", cuda=True).enforce(in_user_namespace=False)


def test_required_isolation_refuses_a_host_that_lacks_some_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []
    monkeypatch.setattr(confinement, "_limit", lambda *_, **__: held.append("limits"))
    monkeypatch.setattr(confinement.namespaces, "drop_capabilities", lambda: None)
    monkeypatch.setattr(confinement, "leave_other_processes_alone", lambda: True)
    monkeypatch.setattr(confinement.landlock, "abi", lambda: 0)
    with pytest.raises(ConfinementError, match=r"does not allow: ranks open .*Landlock.*; ranks do not see the broker"):
        Confinement("required").enforce(in_user_namespace=False)
    assert Confinement("auto").enforce(in_user_namespace=False) == {"limits"}
    assert held == ["limits", "limits"]


def test_what_a_host_allows_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AVAILABLE[0] == "limits"
    assert set(AVAILABLE) <= set(ISOLATION_PARTS)
    monkeypatch.setattr(confinement.sys, "executable", "/nonexistent")
    assert confinement.available() == ("limits",)


def test_an_order_carries_the_policy() -> None:
    policy = JobPolicy("required", JobLimits(2.0, 3.0, 400), ("A",), ("/data",), ("/etc/key",))
    ref = AttemptRef("job_1", 1, HOST)
    from service.jobs.store import StoreLimits

    order = SupervisorOrder(ref.job_id, 1, HOST, "127.0.0.1", "unix:///s", "/d", 1.0, StoreLimits(), policy)
    assert SupervisorOrder.from_line(order.to_line().decode()) == order
    assert dataclasses.asdict(order)["policy"]["isolation"] == "required"


@needs_files
@needs_namespaces
def test_ranks_change_no_modes_times_owners_or_attributes_but_of_their_own_files(tmp_path: Path) -> None:
    """Landlock does not ask who does: a rank could open a key of the user's to everybody, or close a log."""
    data = tmp_path / "data"
    for name in ("data/jobs/1/log", "data/jobs/1/own/file", "data/upload", "key"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    confined = Confinement(
        "auto",
        read=(str(data / "jobs/1"), str(data / "upload")),
        write=(str(data / "jobs/1/own"),),
        covered=(str(data),),
    )
    code = f"""
import os
from pathlib import Path
ways = {{
    "mode": lambda path: path.chmod(0o777),
    "times": lambda path: os.utime(path, (0, 0)),
    "owner": lambda path: os.chown(path, os.getuid(), os.getgid()),
    "attribute": lambda path: os.setxattr(path, "user.a", b"b"),
}}
for name in ("key", "data/jobs/1", "data/jobs/1/log", "data/upload", "data/jobs/1/own", "data/jobs/1/own/file"):
    done = []
    for what, change in ways.items():
        try:
            change(Path({str(tmp_path)!r}, name))
            done.append(what)
        except OSError:
            pass
    print(name, *done)
Path({str(data)!r}, "jobs/1/own/new").write_text("y")
Path("/dev/shm/mine").write_text("y")
open("/dev/null", "w").write("y")
"""
    done = enforce(confined, code)
    assert done.stdout.splitlines() == [
        "key", "data/jobs/1", "data/jobs/1/log", "data/upload",
        "data/jobs/1/own mode times owner attribute", "data/jobs/1/own/file mode times owner attribute",
    ], done.stderr  # fmt: skip
    assert (done.returncode, (data / "jobs/1/own/new").read_text()) == (0, "y"), done.stderr


@needs_files
def test_ranks_set_limits_and_priorities_of_their_own_process_only() -> None:
    """A limit of a second of processor time would end a broker of the same user, and no signal is sent."""
    code = """
import ctypes, os, resource, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def tries(what, function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        print(what, error.strerror)
    else:
        print(what, "done")
for pid in (os.getppid(), 0):
    tries("limit", resource.prlimit, pid, resource.RLIMIT_CPU, (9999, 9999))
    tries("limits are read", resource.prlimit, pid, resource.RLIMIT_CPU)
    tries("nice", os.setpriority, os.PRIO_PROCESS, pid, 19)
    tries("policy", os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
tries("nice to all", os.setpriority, os.PRIO_USER, 0, 19)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
print(subprocess.run(["true"]).returncode)
"""
    refused = "Operation not permitted"
    done = enforce(Confinement("auto"), code)
    assert done.stdout.splitlines() == [
        f"limit {refused}", "limits are read done", f"nice {refused}", f"policy {refused}",
        "limit done", "limits are read done", "nice done", "policy done", f"nice to all {refused}", "0",
    ], done.stderr  # fmt: skip


@needs_namespaces
def test_the_cache_of_another_owner_is_neither_seen_nor_changed(data: DataLayout) -> None:
    """What is made of an upload tells what is in it, and decides what later jobs compute."""
    shares = (HostShare(host=HOST, devices=(0,), pool="cpu"),)
    claim = Claim(AttemptRef("job_1", 1, HOST), train_spec("x"), shares, "127.0.0.1", 15.0)
    code = f"""
from pathlib import Path
cache = Path({str(data.cache)!r})
print(sorted(str(path.relative_to(cache)) for path in cache.rglob("*")))
(cache / "tokens").mkdir(exist_ok=True)
(cache / "tokens" / "made").write_text("x")
"""
    seen = []
    for owner in ("ann", "ben", "ann"):
        confined = JobPolicy("auto").confine(claim, data, "redis://127.0.0.1", read=[], write=[], owner=owner)
        done = enforce(confined, code)
        seen.append(done.stdout.strip() or done.stderr)
    assert seen == ["[]", "[]", "['tokens', 'tokens/made']"]
    made = [path.relative_to(data.cache).parts for path in data.cache.rglob("made")]
    assert len(made) == len({part for part, *_ in made}) == 2
    assert {tuple(rest) for _, *rest in made} == {("tokens", "made")}
