"""Groups of ranks, and supervisors, that are forked from a process which has imported what they need.

``rank_server.py ROOM ORDERS ANSWERS …`` becomes a server for each two open files that are given by their numbers. ROOM
is what its forks may use for their command lines. A server answers its process id once it is ready. Then one JSON line
of orders, ``{"ranks": 2, "output": file for what they write, "call": [arguments of rank_main.main]}``, starts one
group, whose exit status is answered when all its ranks have ended. ``{"supervisor": …}`` starts a supervisor, for which
no answer waits: ``forked_supervisors.py``. Ranks find the variables of torchrun, whose store is kept by a process of
their group, and join it by themselves. The first that fails ends the others, as under torchrun. Ranks have the
environment that the server was started in, and the hash seed of strings in common.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_supervisors
import rank_main
import torch
import torch.distributed as dist

from service.garbage import uncollected
from service.linux import ROOM, die_with_parent

BEFOREHAND = (
    *forked_supervisors.BEFOREHAND,
    "hypothesis.strategies",
    "pytest",
    "scipy.optimize",
    "service.compilation.job",
    "service.training.job",
    "service.verification.first_trace",
    "service.verification.job",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.export._unlift",
)
"""What ranks import anyway and what starts no thread, as onnxruntime does."""
ARROW_ALLOCATOR = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
SETTLES_SECONDS = 0.5
"""A rank that was killed may be seen to end so much later than one that missed it."""
GRACE_SECONDS = 30.0
"""From SIGTERM to SIGKILL, as torchrun has it."""


@dataclass(frozen=True)
class Order:
    ranks: int
    output: str
    call: tuple[str, ...]


def main(*files: str) -> None:
    die_with_parent()
    for name in ROOM:
        os.environ.pop(name, None)
    os.environ.setdefault(*ARROW_ALLOCATOR)  # which would have a thread
    with uncollected():
        for name in BEFOREHAND:
            importlib.import_module(name)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(f"a process of the threads {threads} cannot be forked safely; imports should start none")
    gc.freeze()
    ends = [int(file) for file in files]
    for orders, answers in zip(ends[::2], ends[1::2], strict=True):
        if not os.fork():
            for end in set(ends) - {orders, answers}:
                os.close(end)
            _as_child(lambda orders=orders, answers=answers: serve(orders, answers))
    for end in ends:
        os.close(end)
    for _ in ends[::2]:
        os.wait()


def serve(orders: int, answers: int) -> int:
    die_with_parent()
    with os.fdopen(orders) as lines, os.fdopen(answers, "w") as out:
        print(os.getpid(), file=out, flush=True)
        for line in lines:
            given = json.loads(line)
            if "supervisor" in given:
                _start(forked_supervisors.Order(**given["supervisor"]))
            else:
                print(_run_group(Order(**given)), file=out, flush=True)
    return 0


def _start(order: forked_supervisors.Order) -> None:
    """Start the parent of a supervisor, and collect those that have ended."""
    if not os.fork():
        _as_child(lambda: forked_supervisors.supervise(order))
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass


def _run_group(order: Order) -> int:
    launcher = os.fork()
    if not launcher:
        _as_child(lambda: launch(order))
    _, status = os.waitpid(launcher, 0)
    return os.waitstatus_to_exitcode(status)


def launch(order: Order) -> int:
    """Start the ranks, keep their store and wait for them; the exit status of the group."""
    die_with_parent()
    _write_to(order.output)
    listening = socket.create_server(("127.0.0.1", 0))
    port, running = listening.getsockname()[1], {}
    for rank in range(order.ranks):
        pid = os.fork()
        if not pid:
            listening.close()
            _as_child(lambda rank=rank: _run_rank(order, rank, port))
        running[pid] = rank
    # Only now: the store has threads, and ranks are forked from a process that has one.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    status = _wait(running)
    del store
    return status


def _run_rank(order: Order, rank: int, port: int) -> int:
    die_with_parent()
    os.setsid()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(order.ranks), "LOCAL_WORLD_SIZE": str(order.ranks), "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    rank_main.main(*order.call)
    return 0


def _wait(running: dict[int, int]) -> int:
    """Until all ranks, by process id, have ended. 1 when one failed, which ends the others."""
    failures: list[tuple[int, int, int]] = []
    judged_at = killed_at = float("inf")
    is_judged = False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not is_judged:
                failures.append((rank, pid, code))
                judged_at = min(judged_at, time.monotonic() + (0 if code < 0 else SETTLES_SECONDS))
        elif time.monotonic() > judged_at:
            _tell_cause(failures)
            _signal(running, signal.SIGTERM)
            is_judged, judged_at, killed_at = True, float("inf"), time.monotonic() + GRACE_SECONDS
        elif time.monotonic() > killed_at:
            _signal(running, signal.SIGKILL)
            killed_at = float("inf")
        else:
            time.sleep(0.02)
    if failures and not is_judged:
        _tell_cause(failures)
    return int(bool(failures))


def _tell_cause(failures: list[tuple[int, int, int]]) -> None:
    """Name the rank that failed first: one that a signal ended, since others exit because they miss it."""
    rank, pid, code = next((failure for failure in failures if failure[2] < 0), failures[0])
    cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    print(f"rank {rank} (process {pid}) ended first, with {cause}", file=sys.stderr, flush=True)


def _signal(pids: Any, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _write_to(file: str) -> None:
    """Standard output and standard error of this process and its children."""
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, number)
    os.close(nothing)
    os.close(target)


def _as_child(run: Any) -> None:
    """Run and end this process; its parent's handlers of an exit are not its own."""
    status = 1
    try:
        status = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which names the rank where there is a group
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[2:])
