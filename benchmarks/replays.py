"""Measures what the attack from outside costs a verified row: one job without it and one with it, in turns.

    python benchmarks/replays.py MODEL.onnx QUERY.vnnlib [--replays 100] [--repeats 3] [--seconds 60]

Prints processor seconds of the process for the whole job, and the row's own seconds; both jobs run in this process, on
one thread of the CPU, after one that warms it up.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from recording_reporter import RecordingReporter, upload

from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.verify import VerifySpec
from service.verification.job import run


def spent(files: list[Path], replays: int, seconds: float) -> tuple[str, float, float]:
    """Return the row's verdict, the job's processor seconds and the row's seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        layout, report = DataLayout(Path(scratch)), RecordingReporter()
        ids = [upload(layout, path.read_bytes()) for path in files]
        spec = {"kind": "verify", "device": "cpu", "model": {"onnx": ids[0]}, "property": {"vnnlib": ids[1]}}
        spec |= {"method": "beta-crown", "budget": {"seconds": seconds, "replays": replays}}
        context = RunContext(f"job_{0:020}", 1, 0, 0, 1, "cpu", layout, report, lambda: False)
        began = time.process_time()
        run(VerifySpec.model_validate(spec), context)
        (row,) = report.bounds
        return row["verdict"], time.process_time() - began, row["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs=2)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    spent(given.files, given.replays, given.seconds)
    found: dict[int, list[tuple[str, float, float]]] = {0: [], given.replays: []}
    for _ in range(given.repeats):
        for replays, rows in found.items():
            rows.append(spent(given.files, replays, given.seconds))
    for replays, rows in found.items():
        processor, seconds = (statistics.median(row[at] for row in rows) for at in (1, 2))
        print(f"replays {replays:4}: {rows[0][0]}, processor {processor:.3f} s, row {seconds:.3f} s")


if __name__ == "__main__":
    main()
