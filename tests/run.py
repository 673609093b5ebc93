"""Run tests in several processes at once, then once more, alone, what failed; what passes then is named as flaky.

    python tests/run.py [--processes N] [arguments of pytest]

A test that fails twice fails the run. One that fails beside others and passes alone does not: the last lines name it,
since it is a defect, of the test or of the code, that somebody has to find.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

# What is imported starts no thread, where it has a choice, so that it can be forked.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
sys.dont_write_bytecode = False  # what pytest makes of test files is kept for the next run
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "helpers")]

from forking import ForkedTests  # noqa: E402 - found by what is above
from launching import NVIDIA  # noqa: E402

MOST_REPEATED = 20  # more failures than these are no accident: the change is at fault
PROCESSES = min((os.cpu_count() or 1) + 1, 16)  # tests wait for servers and ranks part of their time


class Failures:
    """The ids of what failed in a run, in order: tests with their fixtures, and files that could not be collected. Each
    is named at once, with the last line of its error, since the rest of a run may take long.
    """

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        self._process = os.getpid()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and os.getpid() == self._process:  # forks tell this process of their tests
            self.ids[report.nodeid] = None
            *_, last = report.longreprtext.splitlines() or [""]
            print(f"\nfailed: {report.nodeid}: {last}", flush=True)


def run_at_once(processes: int, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run the tests that pytest's arguments select; return its exit code and what failed."""
    failures = Failures()
    together = ["--durations", "20", *arguments]
    if NVIDIA.exists():  # imports start threads there, and a process that has some cannot be forked
        together += ["--numprocesses", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
        return int(pytest.main(together, plugins=[failures])), list(failures.ids)
    with tempfile.TemporaryDirectory(prefix="trivet-tests-") as scratch:
        code = pytest.main(together, plugins=[failures, ForkedTests(processes, Path(scratch))])
    return int(code), list(failures.ids)


def passes_alone(test: str) -> bool:
    print(f"\nonce more, alone: {test}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", test], check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    options, others = parser.parse_known_args(arguments)
    code, failed = run_at_once(options.processes, others)
    if code != pytest.ExitCode.TESTS_FAILED or not failed:
        return code
    if len(failed) > MOST_REPEATED:
        print(f"{len(failed)} failed: too many to be run again")
        return code
    flaky = [test for test in failed if passes_alone(test)]
    broken = [test for test in failed if test not in flaky]
    print(f"\n{len(broken)} failed twice, {len(flaky)} flaky (failed beside others, passed alone)")
    for title, tests in (("FAILED TWICE", broken), ("FLAKY", flaky)):
        for test in tests:
            print(f"{title} {test}")
    return code if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
