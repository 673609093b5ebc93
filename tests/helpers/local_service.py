"""``trivet up`` as a process of its own, in a data folder of the test's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from waiting import LIMIT_S, eventually

_PROCESSES = {
    "TRIVET_WARM_SUPERVISORS": "0",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRIVET_CPU_NICENESS": "0",  # other tests compute beside its ranks
}


@contextmanager
def up(data: Path, **changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the service with two CPU slots, whatever GPUs this machine has: tests are the same everywhere."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
    settings = {"TRIVET_DATA": str(data), "TRIVET_PORT": "0", "TRIVET_CPU_SLOTS": "2", "TRIVET_WORKER_NAME": "here"}
    with said(data).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trivet", "up"],
            env={**outer, **settings, **_PROCESSES, **changes},
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=namesakes(data),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)


def namesakes(data: Path, *names: str) -> Path:
    """A folder with somebody's own packages, called like the service's: it must not run them."""
    folder = data.with_suffix(".own")
    for name in ("api", "workers", *names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('not the service')\n")
    return folder


def said(data: Path) -> Path:
    return data.with_suffix(".log")


def address(process: subprocess.Popen[bytes], data: Path) -> str:
    def announced() -> bool:
        assert process.poll() is None, said(data).read_text()
        return "Ctrl-C" in said(data).read_text()

    eventually(announced)
    found = re.search(r"http://\S+", said(data).read_text())
    assert found is not None
    return found[0]


def belonging_to(data: Path, word: str = "") -> list[psutil.Process]:
    """Every process that has the folder in its environment or on its command line; by a word of their command."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if word and word not in (process.name(), *command):
                continue
            if any(str(data) in text for text in [*command, *process.environ().values()]):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if process.pid != os.getpid()]


def processes_of(job_id: str) -> list[psutil.Process]:
    """Every process on this machine that carries the job's id in its environment or command line."""
    found = []
    for process in psutil.process_iter():
        try:
            marks = [*process.environ().values(), *process.cmdline()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(job_id in mark for mark in marks):
            found.append(process)
    return found


def give_way(job_id: str) -> None:
    """Let the ranks of an endless job leave the processors to whatever starts beside them."""
    for process in processes_of(job_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RANK" in process.environ():
                process.nice(19)


def parts_of(process: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
    """The children of a running ``trivet up`` by a word of their command: ``valkey-server``, ``api`` or ``workers``."""
    found = []
    for part in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in (part.name(), *part.cmdline()):
                found.append(part)
    return found


def part_of(process: subprocess.Popen[bytes], word: str) -> psutil.Process:
    """The first of :func:`parts_of`, which may just be being started again."""
    return eventually(lambda: parts_of(process, word))[0]
