"""Run what needs a GPU, and print a line for each promise: ``python tests/gpu/run.py [arguments of pytest]``.

It installs nothing and asks no network: the interpreter that runs it has torch (2.11 or newer), the service's packages
and pytest. What it found goes to ``RESULTS-gpu.json``, with device, torch and commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
FOLDERS = ("gpu", "bounds", "verification", "compilation", "distributed", "workers/launcher")
BOUNDARY = "tests/parallel/boundary"
"""Its tests need no GPU, and must hold on a machine that has one."""
PROCESSES = min(8, max(2, (os.cpu_count() or 2) // 2))
RETURNED_MIB = 64
"""What a device may hold more after the tests than before."""


class Promises:
    """Keeps the outcome of each test, and prints it as it comes."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's own outcome, or that of a fixture that let it fail or be skipped."""
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            words = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
            row: dict[str, Any] = {
                "test": report.nodeid,
                "outcome": report.outcome,
                "seconds": round(report.duration, 1),
            }
            self.found.append(row | ({"reason": reason} if reason else {}))
            print(f"\n{report.outcome:8}{report.duration:6.1f} s  {words}{reason and f' ({reason})'}", flush=True)


def memory_mib() -> list[int]:
    """Return the used memory of each GPU that the tests see; others of the host may be at work."""
    seen = [f"GPU-{torch.cuda.get_device_properties(each).uuid}" for each in range(torch.cuda.device_count())]
    asked = ["nvidia-smi", f"--id={','.join(seen)}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()]


def commit() -> str:
    """Return the commit of the tree, or what a copy without its history says of it."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    note = ROOT / "COMMIT"
    return note.read_text().strip() if note.exists() else told.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all that could run passed."""
    os.chdir(ROOT)
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none; `make test` needs none")
        return 2
    before, began, promises = memory_mib(), time.monotonic(), Promises()
    together = ["--numprocesses", str(PROCESSES), "--dist", "loadfile", "-q", "--no-header", "-p", "no:cacheprovider"]
    marked = ["-m", "cuda", *(arguments or [f"tests/{name}" for name in FOLDERS])]
    codes = [int(pytest.main([*together, *each], plugins=[promises])) for each in (marked, [BOUNDARY])]
    time.sleep(2)
    left = [now - then for now, then in zip(memory_mib(), before, strict=True)]
    returned = max(left) <= RETURNED_MIB
    seconds = round(time.monotonic() - began, 1)
    device = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    found = {
        "device": device,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "seconds": seconds,
        "memory_left_mib": left,
        "tests": promises.found,
    }
    Path("RESULTS-gpu.json").write_text(json.dumps(found, indent=1))
    outcomes = [each["outcome"] for each in promises.found]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    print(
        f"\n{device}, torch {torch.__version__}, {commit()}: {counts} in {seconds:.0f} s; MiB left on devices: {left}"
    )
    return max(codes) or int(not returned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
