"""How many bugs the compile check lets through, and how many sound programs it stops.

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
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

LIMIT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--fast", action="store_true", help="the few programs that a test runs, without generated code")
    parser.add_argument("--without", default="", help="plain: only the check; check: only plain torch")
    parser.add_argument("--within", type=float, default=0.0, help="seconds after which no more programs are begun")
    parser.add_argument("--out", type=Path, help="a file to which results are added as they come, one JSON a line")
    parser.add_argument("--read", type=Path, help="such a file, of which the table is printed")
    parser.add_argument("--names", default="", help=argparse.SUPPRESS)  # what a process of this one runs
    options = parser.parse_args()
    if options.names:
        _serve(options)
        return
    read = options.read.read_text().splitlines() if options.read else ()
    rows = [json.loads(line) for line in read] or _spread(options)
    print(table(rows, _device(options)))


def _device(options: argparse.Namespace) -> str:
    import torch

    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _serve(options: argparse.Namespace) -> None:
    """Run the programs that are named, one after another; print a line for each."""
    from benchmarks.compile_corpus.measure import measured
    from benchmarks.compile_corpus.registry import BY_NAME

    end = time.time() + options.within if options.within else float("inf")
    for name in options.names.split(","):
        if time.time() < end:
            row = measured(BY_NAME[name], options.device, fast=options.fast, without=options.without)
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")


def _spread(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all chosen programs in processes, each of which takes every so many of them."""
    from benchmarks.compile_corpus.registry import ALL

    device = _device(options)
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    names = [each.name for each in ALL if each.name.startswith(wanted) and (each.fast or not options.fast)]
    groups = [names[start :: options.jobs] for start in range(min(options.jobs, len(names)))]
    with ThreadPoolExecutor(len(groups)) as pool:
        found = list(pool.map(lambda group: _process(group, device, options), groups))
    return sorted((row for rows in found for row in rows), key=lambda row: names.index(row["name"]))


def _process(names: Sequence[str], device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a process; after one that the compiler took down, another goes on with the rest."""
    rows: list[dict[str, Any]] = []
    left, began = list(names), time.time()
    while left and not (options.within and time.time() - began > options.within):
        command = [sys.executable, "-m", "benchmarks.compile_corpus", "--names", ",".join(left), "--device", device]
        command += ["--fast"] if options.fast else []
        command += ["--out", str(options.out)] if options.out else []
        command += ["--without", options.without] if options.without else []
        command += ["--within", str(options.within - (time.time() - began))] if options.within else []
        with tempfile.TemporaryFile("w+") as out:
            subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, timeout=LIMIT_S * len(left), check=False)
            out.seek(0)
            done = [json.loads(line) for line in out if line.startswith("{")]
        rows += done
        left = left[len(done) :]
        if left and not (options.within and time.time() - began > options.within):
            rows.append({"name": left.pop(0), "crashed": True})
    return rows


def table(rows: Sequence[dict[str, Any]], device: str) -> str:
    import torch

    from benchmarks.compile_corpus.registry import BY_NAME

    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    version = ".".join(torch.__version__.split(".")[:2])
    bugs = [row for row in rows if BY_NAME[row["name"]].is_wrong(device, version)]
    absent = [row for row in rows if BY_NAME[row["name"]].bug and row not in bugs]
    sound = [row for row in rows if row not in bugs and row not in absent]
    shown = [row for row in bugs if row.get("shows")]
    stopped = [row for row in sound if row.get("stopped") or row.get("crashed")]
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
    gone = [f"  not a bug of this version: {row['name']}" for row in absent]
    quiet = [f"  shows not in plain torch: {row['name']}" for row in bugs if not row.get("shows")]
    return "\n".join([*counts, *missed, *alarms, *wrong, *gone, *quiet])


def _line(row: dict[str, Any]) -> str:
    if row.get("crashed"):
        return f"{row['name']}: the process ended"
    shows = f" (plain torch: {row['shows']})" if row.get("shows") else ""
    return f"{row['name']}: {row.get('stopped') or 'passed'}{shows}"


if __name__ == "__main__":
    main()
