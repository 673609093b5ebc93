"""Counts the bugs that the compile check lets through, and the sound programs that it stops.

Runs every program of the corpus in plain torch (eager beside ``module.compile()``, as a job would do it) and through
the check, in processes of its own, and prints a table: which bugs show themselves, which are caught and which are
missed; which sound programs pass, which are stopped, and why; seconds. From the checkout:

    python -m benchmarks.compile_corpus [--device cuda] [--jobs 4] [--only NAME,…] [--fast] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Lock, Timer
from typing import Any

LIMIT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--names", default="", help="whole names, separated by commas")
    parser.add_argument("--fast", action="store_true", help="the few programs that a test runs, without generated code")
    parser.add_argument("--without", default="", help="plain: only the check; check: only plain torch")
    parser.add_argument("--within", type=float, default=0.0, help="seconds after which no more programs are begun")
    parser.add_argument("--out", type=Path, help="a file to which results are added as they come, one JSON a line")
    parser.add_argument("--log", type=Path, help="a file for what the processes say besides")
    parser.add_argument("--read", type=Path, help="such a file, of which the table is printed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # the work of a child process
    options = parser.parse_args()
    if options.serve:
        _serve(options)
        return
    read = options.read.read_text().splitlines() if options.read else ()
    rows = [json.loads(line) for line in read] or _spread(options)
    print(table(rows, _device(options)))


def _device(options: argparse.Namespace) -> str:
    import torch

    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _serve(options: argparse.Namespace) -> None:
    """Measure the program that each line of standard input names, without the parts that it leaves out; print a line
    for each.
    """
    from benchmarks.compile_corpus.measure import measured
    from benchmarks.compile_corpus.registry import BY_NAME

    for line in sys.stdin:
        name, without = line.split()
        print(json.dumps(measured(BY_NAME[name], options.device, fast=options.fast, without=without)), flush=True)


def _spread(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all chosen programs in processes, each of which takes the next one when it has ended one."""
    from benchmarks.compile_corpus.registry import ALL

    wanted = tuple(options.only.split(",")) if options.only else ("",)
    names = [each.name for each in ALL if each.name.startswith(wanted) and (each.fast or not options.fast)]
    names = options.names.split(",") if options.names else names
    left, options.device = iter(names), _device(options)
    end = time.time() + options.within if options.within else float("inf")
    lock = Lock()

    def work(_: int) -> list[dict[str, Any]]:
        process, rows = _Process(options), []
        while time.time() < end:
            with lock:
                name = next(left, "")
            if not name:
                break
            rows.append(process.row(name))
            if options.out:
                with lock, options.out.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
        process.end()
        return rows

    jobs = min(options.jobs, len(names))
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(work, range(jobs)))
    return sorted((row for rows in found for row in rows), key=lambda row: names.index(row["name"]))


class _Process:
    """A process that measures programs, and another one once the compiler has taken it down."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._running: subprocess.Popen[str] | None = None

    def row(self, name: str) -> dict[str, Any]:
        """Return a program's results, in plain torch and then through the check, unless that is left out."""
        row: dict[str, Any] = {"name": name}
        for part, other, field in (("plain", "check", "shows"), ("check", "plain", "stopped")):
            if self._options.without != part:
                row |= self._asked(name, without=other, field=field)
        return row

    def end(self) -> int:
        """End the process; return its code."""
        if self._running is None:
            return 0
        assert self._running.stdin is not None
        with suppress(OSError):
            self._running.stdin.close()
        code, self._running = self._running.wait(), None
        return code

    def _asked(self, name: str, *, without: str, field: str) -> dict[str, Any]:
        running = self._running = self._running or self._started()
        assert running.stdin is not None
        assert running.stdout is not None
        limit = Timer(LIMIT_S, running.kill)
        limit.start()
        running.stdin.write(f"{name} {without}\n")
        running.stdin.flush()
        line = next((line for line in running.stdout if line.startswith("{")), "")
        limit.cancel()
        return json.loads(line) if line else {field: f"the process ended with code {self.end()}", "crashed": True}

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.compile_corpus", "--serve", "--device", self._options.device]
        command += ["--fast"] if self._options.fast else []
        log = (self._options.log or Path(os.devnull)).open("a")
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)


def table(rows: Sequence[dict[str, Any]], device: str) -> str:
    import torch

    from benchmarks.compile_corpus.registry import BY_NAME

    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    version = ".".join(torch.__version__.split(".")[:2])
    bugs = [row for row in rows if BY_NAME[row["name"]].is_wrong(device, version)]
    absent = [row for row in rows if BY_NAME[row["name"]].bug and row not in bugs]
    sound = [row for row in rows if row not in bugs and row not in absent]
    shown = [row for row in bugs if row.get("shows")]
    stopped = [row for row in sound if row.get("stopped")]
    seconds = [row["check_s"] for row in rows if row.get("check_s")]
    counts = [
        f"torch {torch.__version__} on {where}: {len(rows)} programs",
        f"bugs: {len(bugs)}, of which {len(shown)} show themselves in plain torch "
        f"({sum(bool(row.get('stopped')) for row in shown)} of these caught); "
        f"caught {sum(bool(row.get('stopped')) for row in bugs)}, "
        f"missed {sum(not row.get('stopped') for row in bugs)}",
        f"sound: {len(sound)}, passed {len(sound) - len(stopped)}, stopped {len(stopped)}; "
        f"wrong in plain torch {sum(bool(row.get('shows')) for row in sound)}",
    ]
    if seconds:
        counts.append(f"seconds of a check: median {median(seconds):.1f}, most {max(seconds):.1f}")
    missed = [f"  missed: {_line(row)}" for row in bugs if not row.get("stopped")]
    alarms = [f"  stopped: {_line(row)}" for row in stopped]
    wrong = [f"  wrong in plain torch: {row['name']} ({row['shows']})" for row in sound if row.get("shows")]
    gone = [f"  not known as a bug of this version and device: {row['name']}" for row in absent]
    quiet = [f"  shows not in plain torch: {row['name']}" for row in bugs if not row.get("shows")]
    return "\n".join([*counts, *missed, *alarms, *wrong, *gone, *quiet])


def _line(row: dict[str, Any]) -> str:
    shows = f" (plain torch: {row['shows']})" if row.get("shows") else ""
    return f"{row['name']}: {row.get('stopped') or 'passed'}{shows}"


if __name__ == "__main__":
    main()
