"""Measures processor seconds of one query as a job, phase by phase: they do not depend on other load of the machine.

Each job is a fork of a process with the same imports as the one from which a host forks jobs, and runs the
program of a rank alone, without a service; the network and its queries are those of ``queries.py``. The first job
traces the network; the next ones find its trace. *search* is the row's wall seconds of its instance. The last
line is the cost of a fork of that process and its end, in it and in the fork.

    python benchmarks/query_cpu.py [--jobs 5] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from queries import Net
from recording_reporter import RecordingReporter, upload

from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import VerifySpec
from service.linux import use_large_pages
from workers import forks
from workers.launcher import preloading

PHASES = ("loading", "preparing", "first row", "ending")
FORKS = 20
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


class Phases(RecordingReporter):
    """Notes the processor seconds of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self._name, self._began = "loading", time.process_time()

    def phase(self, name: str) -> None:
        now = time.process_time()
        self.seconds[self._name] = now - self._began
        self._name, self._began = name, now


def specification(data: DataLayout, query: int, device: str) -> VerifySpec:
    net = Net.drawn(0)
    names = [upload(data, content) for content in (net.onnx(), net.query(query).encode())]
    fields = {"model": {"onnx": names[0]}, "property": {"vnnlib": names[1]}, "method": "beta-crown", "device": device}
    return VerifySpec.model_validate(fields | {"budget": {"seconds": 60}})


def run(data: DataLayout, number: int, device: Any) -> int:
    """Be one job, and leave the times of its phases."""
    from service.verification.job import run as verify

    report, spec = Phases(), specification(data, number, device)
    paths = data.job(f"job_{number:020d}")
    for folder in (paths.artifacts, paths.checkpoints, paths.work(1)):
        folder.mkdir(parents=True)
    torch.set_num_threads(1)
    kept = data.root / "host"
    kept.mkdir(exist_ok=True)
    verify(spec, RunContext(paths.root.name, 1, 0, 0, 1, device, data, report, lambda: False, host_cache=kept))
    report.phase("")
    found = {**report.seconds, "search": report.bounds[0]["seconds"]}
    (paths.root / "seconds.json").write_text(json.dumps(found))
    return 0


def fork_seconds(stdin: int) -> float:
    """Return the processor seconds of a fork that does nothing, here and there."""
    began = _spent()
    for _ in range(FORKS):
        forks.fork(lambda: 0, stdin=stdin).wait()
    return (_spent() - began) / FORKS


def _spent() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in NO_THREADS.items()):  # numpy reads them with its import
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **NO_THREADS})
    preloading.preload_every_kind()
    if len(names := forks.threads()) > 1:
        raise SystemExit(f"a process with threads ({', '.join(names)}) is not forked")
    gc.freeze()
    use_large_pages()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, on {options.device},")
    print(f"commit {commit.stdout.strip()}. Processor seconds, and wall seconds of the search.\n")
    print(f"| job | {' | '.join(PHASES)} | search |\n|---|{'--:|' * (len(PHASES) + 1)}")
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("rb") as nothing:
        data = DataLayout(Path(folder))
        for number in range(options.jobs):
            if forks.fork(partial(run, data, number, options.device), stdin=nothing.fileno()).wait() != 0:
                raise SystemExit(f"job {number} failed")
            found = json.loads((data.job(f"job_{number:020d}").root / "seconds.json").read_bytes())
            print(f"| {number + 1} | {' | '.join(f'{found.get(name, 0.0):.3f}' for name in (*PHASES, 'search'))} |")
        print(f"\nA fork with its end: {1000 * fork_seconds(nothing.fileno()):.0f} ms.")


if __name__ == "__main__":
    main()
