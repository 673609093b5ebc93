"""The rank program of these tests: the real one, with a kind whose behaviour the job's name chooses."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from service.jobs.runtime import LARGEST_RESULT, RefusedError, RunContext, Runner
from workers.rank.program import main


def succeed(context: RunContext) -> dict[str, Any]:
    """Meets its peers through a real collective, prints, reports, publishes."""
    import torch
    import torch.distributed as dist

    from service.parallel import distributed

    distributed.start("cpu")
    total = torch.tensor([context.rank + 1.0])
    dist.all_reduce(total)
    print(f"rank {context.rank} says hello", flush=True)
    print("and complains", file=sys.stderr, flush=True)
    context.report.metric(1, {"loss": 0.5})
    context.report.progress(1, 1, "steps")
    if context.rank == 0:
        path = context.paths.artifacts / "model.bin"
        path.write_bytes(b"weights")
        context.report.artifact(path)
        checkpoint = context.paths.checkpoints / "step_1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "meta.json").write_text("{}")
        context.report.artifact(checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    return {"total": total.item()}


def nothing(context: RunContext) -> None:
    return None


def environment(context: RunContext) -> dict[str, Any]:
    return {"environment": dict(os.environ), "folder": str(Path.cwd())}


def exchange(context: RunContext) -> dict[str, Any]:
    """Exchanges pickled objects with its peers until the file ``go`` appears in the job's folder."""
    import torch.distributed as dist

    from service.parallel import distributed

    distributed.start("cpu")
    rounds, going = 0, True
    while going:
        rounds += 1
        values: list[Any] = [None] * context.world_size
        dist.all_gather_object(values, (context.rank, not (context.paths.root / "go").exists()))
        going = all(value[1] for value in values)
        context.report.metric(rounds, {"ranks": len(values)})
        time.sleep(0.02)
    return {"rounds": rounds}


def surroundings(context: RunContext) -> dict[str, Any]:
    """What a process can find out about itself that its job has not chosen; of rank 0."""
    import resource
    import tempfile

    import torch

    own = ("TRIVET_EVENTS_SECRET", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
    environment = {name: value for name, value in sorted(os.environ.items()) if name not in own}
    scratch = environment["TMPDIR"]
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    told = ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Uid", "Gid", "Groups", "Umask")
    masks = ("SigBlk", "SigIgn", "SigCgt")
    programs = (1 << 31) - 1  # what is beyond them belongs to the C library
    spaces = Path("/proc/self/ns")
    shown = Path("/proc/self/environ").read_bytes().decode().split("\0")
    found = {
        "environment": environment,
        "shown": sorted(word for word in shown if word and not word.startswith(own)),
        "limits": {
            name: resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT")
        },
        "namespaces": [str((spaces / name).readlink()) for name in ("user", "mnt", "net", "ipc")],
        "interfaces": Path("/proc/net/dev").read_text().count(":"),
        "mounts": sorted({line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}),
        "status": {name: status.get(name) for name in told},
        "handled": {name: int(status[name], 16) & programs for name in masks},
        "session": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "folder": str(Path.cwd()),
        "temporary": tempfile.gettempdir(),
        "path": sys.path,
        "argv": sys.argv,
        "flags": repr(sys.flags),
        "threads": torch.get_num_threads(),
        "signals": repr([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)]),
        "descriptors": sorted(_kind_of(each) for each in Path("/proc/self/fd").iterdir()),
    }
    return {"found": {name: repr(value).replace(str(Path(scratch).parent), "GROUP") for name, value in found.items()}}


def _kind_of(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink()).partition(":")[0]
    except FileNotFoundError:
        return ""


def look_around(context: RunContext) -> dict[str, Any]:
    """Tries all that the file ``tries.json`` in the job's folder lists; what came of each."""
    import json

    tries = json.loads((context.paths.root / "tries.json").read_text())
    return {"found": {name: attempted(act, argument) for name, (act, argument) in tries.items()}}


def attempted(act: str, argument: Any) -> str:
    """``ok``, or the name of the error that stopped ``act``."""
    import ctypes
    import resource
    import socket

    def connect(kind: int, address: Any) -> None:
        with socket.socket(kind) as connection:
            connection.settimeout(5)
            connection.connect(address)

    def allocate(size: int) -> None:
        ctypes.memset(ctypes.create_string_buffer(size), 1, size)

    acts: Mapping[str, Callable[[Any], Any]] = {
        "read": lambda path: Path(path).read_bytes(),
        "list": os.listdir,
        "link": lambda path: Path(path).symlink_to("/etc/passwd"),
        "remove": lambda path: Path(path).unlink(),
        "remove folder": lambda path: Path(path).rmdir(),
        "remove beside the socket": lambda name: Path(os.environ["TRIVET_EVENTS"]).with_name(name).unlink(),
        "write": lambda path: Path(path).write_text("was here"),
        "write much": lambda path: Path(path).write_bytes(bytes(3 << 20)),
        "allocate": allocate,
        "connect": lambda path: connect(socket.AF_UNIX, path),
        "connect to port": lambda port: connect(socket.AF_INET, ("127.0.0.1", port)),
        "signal": lambda pid: os.kill(pid, 0),
        "limit": lambda name: resource.getrlimit(getattr(resource, name))[1],
        "status": lambda name: next(
            line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
        ),
    }
    try:
        found = acts[act](argument)
    except (OSError, MemoryError) as error:
        return type(error).__name__
    return str(found) if act in ("limit", "status", "list") else "ok"


def meet_then(act: Callable[[RunContext], None], context: RunContext) -> None:
    """Rank 1 acts; its peers wait for it in a collective that cannot end."""
    import torch
    import torch.distributed as dist

    from service.parallel import distributed

    distributed.start("cpu")
    dist.barrier()
    print(f"rank {context.rank} met the others", flush=True)
    if context.rank == 1:
        act(context)
    dist.all_reduce(torch.zeros(1))


def raising(context: RunContext) -> None:
    def act(_: RunContext) -> None:
        raise ValueError("the loss is not a number")

    meet_then(act, context)


def refusing(context: RunContext) -> None:
    raise RefusedError("model.onnx: no rule for ONNX Det")


def waiting(context: RunContext) -> None:
    """Waits for its peers, all of which but one wait too."""
    meet_then(lambda _: time.sleep(3600), context)


def vanishing(context: RunContext) -> None:
    meet_then(lambda _: os._exit(3), context)


def leaving(context: RunContext) -> None:
    """Exits with code 0 before its work is done."""
    if context.rank == 0:
        os._exit(0)
    time.sleep(3600)


def endless(context: RunContext) -> dict[str, Any]:
    """Works until asked to stop; then publishes what it has. Leaves a daemon behind in a session of its own."""
    os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sleep", "3600")
    context.report.progress(0, 10, "steps")
    print("working", flush=True)
    step = 0
    while not context.should_stop():
        step += 1
        context.report.metric(step, {"loss": 1.0})
        time.sleep(0.02)
    path = context.paths.artifacts / f"checkpoint-{context.rank}.txt"
    path.write_text("saved")
    context.report.artifact(path)
    return {"stopped": True, "completed": {"done": step, "total": 1_000_000, "unit": "steps"}}


def until_told(context: RunContext) -> dict[str, Any]:
    """Works until the file ``go`` appears in the job's folder."""
    step = 0
    while not (context.paths.root / "go").exists():
        step += 1
        context.report.metric(step, {"loss": 1.0})
        time.sleep(0.02)
    return {"steps": step}


STEPS = 200


def counting(context: RunContext, pace_s: float = 0.02) -> dict[str, Any]:
    """Reports 200 steps. Every tenth is a checkpoint, from which a later attempt goes on."""
    saved = context.paths.checkpoints / "step"
    saved.parent.mkdir(exist_ok=True)
    step = int(saved.read_text()) if saved.exists() else 0
    while step < STEPS and not context.should_stop():
        step += 1
        context.report.metric(step, {"loss": 1.0})
        context.report.progress(step, STEPS, "steps")
        if step % 10 == 0:
            saved.with_suffix(".part").write_text(str(step))
            saved.with_suffix(".part").replace(saved)
        time.sleep(pace_s)
    return {"steps": step, "completed": {"done": step, "total": STEPS, "unit": "steps"}}


def counting_slowly(context: RunContext) -> dict[str, Any]:
    """Takes 20 s for that."""
    return counting(context, pace_s=0.1)


def publishing(context: RunContext) -> None:
    """Writes the same file again and again, in place and anew, and announces it now and then."""
    path = context.paths.artifacts / "report.bin"
    version = 0
    while not context.should_stop():
        version += 1
        content = f"{context.attempt}.{version} ".encode() * 2000
        if version % 2:
            path.write_bytes(content)
        else:
            path.with_suffix(".part").write_bytes(content)
            path.with_suffix(".part").replace(path)
        if version % 5 == 1:
            context.report.artifact(path)
        time.sleep(0.01)


def deadlocked(context: RunContext) -> None:
    """Reports a step, then waits for what does not come: rank 1 for a lock, its peers for rank 1.

    Until all ranks are there they are heard of, however long that takes.
    """
    context.report.metric(1, {"loss": 1.0})
    folder = context.paths.work(context.attempt)
    (folder / f"here-{context.rank}").touch()
    while len(list(folder.glob("here-*"))) < context.world_size:
        print("on the way", flush=True)
        time.sleep(0.1)
    if context.rank == 1:
        wait_for_a_lock()
    time.sleep(3600)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def writing(context: RunContext) -> None:
    """Fills its folder, in which there is little room."""
    (context.paths.artifacts / "big.bin").symlink_to("/dev/full")
    with (context.paths.artifacts / "big.bin").open("wb") as file:
        file.write(b"x" * 100_000)


def writing_its_events(context: RunContext) -> None:
    """Reports until there is no room for what it reports."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, context.report._events._file)  # type: ignore[attr-defined]
    while True:
        context.report.metric(1, {"loss": 1.0})


def hoarding(context: RunContext) -> dict[str, Any]:
    """Announces a file of more than anybody could read."""
    path = context.paths.artifacts / "hole"
    with path.open("ab") as file:
        file.truncate(1 << 39)
    context.report.artifact(path)
    print("it is all yours", flush=True)
    return {}


def flooding(context: RunContext) -> dict[str, Any]:
    """Announces one artifact after the other."""
    for number in range(6):
        path = context.paths.artifacts / f"{number}.txt"
        path.write_text(f"the {number}th")
        context.report.artifact(path)
    return {}


def overflowing(context: RunContext) -> dict[str, Any]:
    """Returns more than a job's record holds."""
    return {"text": "x" * LARGEST_RESULT}


def piping(context: RunContext) -> dict[str, Any]:
    """Puts pipes, at whose other end nobody is, where files should be."""
    for path in (context.paths.artifacts / "pipe", context.paths.work(context.attempt) / "result.json"):
        os.mkfifo(path)
    context.report.artifact(context.paths.artifacts / "pipe")
    return {}


def stubborn(context: RunContext) -> None:
    """Never obeys."""
    print("working", flush=True)
    while True:
        time.sleep(1)


BEHAVIOURS: Mapping[str, Callable[[RunContext], Any]] = {
    function.__name__: function
    for function in (
        succeed, nothing, environment, exchange, look_around, surroundings, raising, refusing, waiting, vanishing,
        leaving, endless, counting, counting_slowly, publishing, deadlocked, writing, until_told, stubborn,
        writing_its_events, hoarding, flooding, overflowing, piping,
    )
}  # fmt: skip


WHOLE = {"done": 1, "total": 1, "unit": "steps"}


def find_runner(kind: str) -> Runner:
    """Behaviours do all their work, unless they say otherwise."""
    return lambda spec, context: {"completed": WHOLE, **(BEHAVIOURS[spec.name](context) or {})}


if __name__ == "__main__":
    if os.environ.get("RANK") is not None and os.environ.get("TRIVET_JOB") is None:
        raise SystemExit("not started by a supervisor")
    sys.exit(main(find_runner))
