"""Measures what an idle service costs, what a small job leaves on disk, and how soon the next one starts.

    python benchmarks/idle.py [--minutes 5] [--jobs 8] [--again 1]

``trivet up`` runs some small trainings, one after the other, and is then left alone. A line for each minute says how
much of one core its processes took, and how much memory they hold at its end: PSS, which divides shared pages among
those who share them, and USS, which is theirs alone. Then as many more trainings run as ``--again`` says. Of each, a
line has the seconds from ``submit`` to its claim, to the first line of its ranks, and to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import stat
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from local_service import address, belonging_to, up  # noqa: E402 - which the line before makes importable
from small_jobs import small_job  # noqa: E402

from trivet import Client  # noqa: E402

MIB = 2**20
PARTS = {
    "valkey-server": "broker",
    "fork-server": "fork server",
    "workers": "worker",
    "api": "API",
    "up": "trivet up",
}
SPEC = small_job(5)


class Cost(NamedTuple):
    """What a process has taken and holds: seconds of a core, MiB."""

    seconds: float
    pss: float
    uss: float


def part_of(process: psutil.Process) -> str:
    """Return which part of the service a process is."""
    words = [process.name(), *process.cmdline()]
    return next((part for word, part in PARTS.items() if any(word in each for each in words)), "other")


def costs(data: Path, first: int) -> dict[int, tuple[str, Cost]]:
    """Return what each process of the service has cost so far, with the part that it belongs to."""
    found: dict[int, tuple[str, Cost]] = {}
    for process in {*belonging_to(data), psutil.Process(first), *psutil.Process(first).children(recursive=True)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory, times = process.memory_full_info(), process.cpu_times()
            cost = Cost(times.user + times.system, memory.pss / MIB, memory.uss / MIB)
            found[process.pid] = part_of(process), cost
    return found


def tell(
    minute: int, before: Mapping[int, tuple[str, Cost]], after: Mapping[int, tuple[str, Cost]], wall_s: float
) -> None:
    """Print a minute, in all and by part; a process that began or ended in it counts as far as it is known."""
    parts: dict[str, list[Cost]] = defaultdict(list)
    for pid, (part, cost) in after.items():
        spent = cost.seconds - (before[pid][1].seconds if pid in before else 0.0)
        parts[part].append(cost._replace(seconds=spent))

    def line(name: str, costs: Sequence[Cost]) -> str:
        seconds, pss, uss = (sum(each) for each in zip(*costs, strict=True))
        return f"{name} {100 * seconds / wall_s:.2f} % {pss:.0f}/{uss:.0f}"

    whole = line("all", [cost for costs in parts.values() for cost in costs])
    told = " | ".join(line(part, costs) for part, costs in sorted(parts.items()))
    print(f"minute {minute}: {whole} MiB | {told}", flush=True)


def run(client: Client) -> tuple[str, str]:
    """Run a small training; return its id, and in words how long it took to get where."""
    asked = time.time()
    job = client.submit(SPEC)
    ended = client.wait(job.id, timeout_s=120)
    if ended.state != "succeeded" or ended.started_at is None or ended.ended_at is None:
        raise SystemExit(f"{job.id} {ended.state}: {ended.error}")
    spans: list[dict[str, Any]] = client.events(job.id, types=["span"])["items"]
    first = next(each["start"] for each in spans if each["name"] == "import")
    moments = {"claimed": ended.started_at.timestamp(), "first line": first, "end": ended.ended_at.timestamp()}
    return job.id, ", ".join(f"{name} {at - asked:.2f} s" for name, at in moments.items())


def left_by(folder: Path) -> tuple[float, int, int, float]:
    """Return what a folder takes of the disk in kB, its files (one with several names is one), its folders with itself,
    and kB of contents.
    """
    held = {(found.st_dev, found.st_ino): found for each in [folder, *folder.rglob("*")] for found in [each.lstat()]}
    files = [found for found in held.values() if not stat.S_ISDIR(found.st_mode)]
    allocated = sum(found.st_blocks * 512 for found in held.values()) / 1000
    return allocated, len(files), len(held) - len(files), sum(found.st_size for found in files) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--again", type=int, default=1)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as spare,
        up(data := Path(spare, "data"), TRIVET_WARM_SUPERVISORS="1") as process,
    ):
        with Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
            for number in range(asked.jobs):
                job, told = run(client)
                allocated, files, folders, content = left_by(data / "jobs" / job)
                print(
                    f"job {number}: {told}; "
                    f"{allocated:.0f} kB on disk, {files} files, {folders} folders, {content:.0f} kB of contents",
                    flush=True,
                )
        broker = sum(path.stat().st_size for path in (data / "broker").rglob("*") if path.is_file()) / 1000
        print(f"broker {broker:.0f} kB on disk", flush=True)
        before, began = costs(data, process.pid), time.monotonic()
        for minute in range(1, asked.minutes + 1):
            time.sleep(60)
            after, now = costs(data, process.pid), time.monotonic()
            tell(minute, before, after, now - began)
            before, began = after, now
        with Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
            for _ in range(asked.again):
                _, told = run(client)
                print(f"after {asked.minutes} idle minutes: {told}", flush=True)


if __name__ == "__main__":
    main()
