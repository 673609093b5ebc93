"""Real torchrun groups on gloo, for the tests of any room: import the ``torchrun`` fixture in its ``conftest.py``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

RANK_MAIN = Path(__file__).parent / "rank_main.py"
ROOT = Path(__file__).parents[1]


class GroupFailureError(AssertionError):
    """A rank ended with an error, or the group outlived its time; ``output`` holds what all ranks wrote."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(f"{message}\n{output[-8000:]}")
        self.output = output


@dataclass(frozen=True)
class Torchrun:
    """Call it with a module-level function of the test module: each rank runs it and returns something JSON can hold.

    The function imports what it needs from ``service`` and starts the group itself
    (``service.parallel.distributed.start("cpu")``). Results come back in rank order.
    """

    folder: Path

    def __call__(self, function: Callable[..., Any], ranks: int, timeout_s: float = 120, **arguments: Any) -> list[Any]:
        results = self.folder / f"{function.__name__}-{len(list(self.folder.iterdir()))}"
        results.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        # An endpoint of our own with port 0: the system picks the port, so parallel tests never meet.
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        command += [str(RANK_MAIN), function.__code__.co_filename, function.__name__]
        output = _run([*command, json.dumps(arguments), str(results)], timeout_s)
        files = [results / f"{rank}.json" for rank in range(ranks)]
        if not all(file.exists() for file in files):
            raise GroupFailureError("not every rank left a result", output)
        return [json.loads(file.read_text()) for file in files]


def _run(command: list[str], timeout_s: float) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_with_descendants(process.pid)
        output, _ = process.communicate()
        raise GroupFailureError(f"the group was still running after {timeout_s} s", output) from None
    if process.returncode:
        raise GroupFailureError(f"the group ended with exit status {process.returncode}", output)
    return output


def _kill_with_descendants(pid: int) -> None:
    """Ranks are in sessions of their own, so the launcher's end alone would leave them behind."""
    launcher = psutil.Process(pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    folder = tmp_path / "torchrun"
    folder.mkdir()
    return Torchrun(folder)
