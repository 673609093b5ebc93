"""Measures how long VNN-COMP's ``run_instance.sh`` takes to answer: without a service, and with one that is up.

    python benchmarks/vnncomp_start.py ONNX VNNLIB [--runs 10] [--settle 12] [--device cpu|cuda]

Seconds from the call to its end, median (most); the first call without a service traces the network. The service is a
``trivet up`` of its own, started here, which has ``--settle`` seconds and one instance before the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 120.0


def answered(words: list[str], environment: dict[str, str], folder: Path) -> tuple[str, float]:
    """Return the verdict and the seconds of one call."""
    results, began = folder / "results.txt", time.monotonic()
    script = ROOT / "examples" / "vnncomp" / "run_instance.sh"
    subprocess.run([script, "v1", "start", *words, results, "60"], env=environment, check=True, capture_output=True)
    return results.read_text().split("\n", 1)[0], time.monotonic() - began


def measured(name: str, runs: int, words: list[str], environment: dict[str, str], folder: Path) -> None:
    found = [answered(words, environment, folder) for _ in range(runs)]
    seconds = [each for _, each in found]
    verdicts = ", ".join(sorted({verdict for verdict, _ in found}))
    print(f"| {name} | {runs} | {verdicts} | {statistics.median(seconds):.2f} ({max(seconds):.2f}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("onnx", type=Path)
    parser.add_argument("vnnlib", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--settle", type=float, default=12.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    words = [str(given.onnx.resolve()), str(given.vnnlib.resolve())]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if given.device == "cpu" else {}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")} | hidden
        environment |= {"TRIVET_DATA": str(folder / "data"), "TRIVET_PORT": "0", "TRIVET": str(_trivet(folder))}
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
        print(f"Load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores.\n\n| start | runs | verdict | seconds |")
        print("|---|--:|---|--:|")
        measured("cold: no service", given.runs, words, environment, folder)
        with (folder / "up.log").open("wb") as log:
            service = subprocess.Popen([sys.executable, "-m", "trivet", "up"], env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while b"Ctrl-C" not in (folder / "up.log").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(given.settle)
            answered(words, environment, folder)
            measured("warm: a service", given.runs, words, environment, folder)
        finally:
            service.terminate()
            service.wait()


def _trivet(folder: Path) -> Path:
    """Write the command that the scripts start."""
    path = folder / "trivet"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trivet "$@"\n')
    path.chmod(0o700)
    return path


if __name__ == "__main__":
    main()
