"""A benchmark that is ended by a signal ends what it started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import os, signal, sys
from ending import end_by_signals

end_by_signals()
try:
    print("runs", flush=True)
    sys.stdin.read()
finally:
    os.kill(os.getpid(), signal.SIGTERM)  # timeout sends a second one, to the whole group
    print("ended", flush=True)
"""


def test_a_benchmark_that_timeout_ends_ends_what_it_has_entered() -> None:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, cwd=BENCHMARKS, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 128 + signal.SIGTERM
