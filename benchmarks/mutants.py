"""Finds which of the planted faults in ``mutants.toml`` each test command catches.

    python benchmarks/mutants.py [--only NAME …] [--named] [--out table.json] [--at-a-time 2]

Each fault is one changed line in a scratch copy of the sources. The tests that should see it are run first, those of
``make test`` before the slow ones; a fault that they miss is tried on everything that the command runs. So *caught by
make test* means that a test without the mark ``slow`` failed, and *caught by make test-all* that any did. A test that
fails is run once more without the fault: if it fails there too, it has caught nothing. With ``--named`` no other tests
than those are run, which takes minutes in place of hours. Nothing is asserted; the table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("api", "benchmarks", "docker", "docs", "examples", "service", "tests", "trivet", "workers")
FAST, SLOW = "not slow", "slow"
LIMIT_S = 3600.0
NO_TEST_SELECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Mutant:
    """A fault: in ``file``, the only place of ``before`` becomes ``after``; ``tests`` are those that should see it."""

    name: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        return "/".join(Path(self.file).parts[:2])


@dataclass(frozen=True)
class Outcome:
    """The fate of a mutant: the command that caught it first, if any, by which test, after how long."""

    mutant: str
    room: str
    what: str
    caught_by: str | None
    test: str | None
    seconds: float


def read_mutants(path: Path) -> list[Mutant]:
    """Read the faults and check that each has exactly one place in the sources.

    :raises ValueError: for a fault whose line is not there, or is there twice.
    """
    rows = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    for mutant in mutants:
        places = (ROOT / mutant.file).read_text().count(mutant.before)
        if places != 1:
            raise ValueError(f"{mutant.name}: {mutant.before!r} is in {mutant.file} {places} times, not once")
    return mutants


def copy_of_the_sources(folder: Path) -> Path:
    unwanted = shutil.ignore_patterns(".*_cache", ".trivet")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=unwanted, symlinks=True)
    for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.yml"), *ROOT.glob("*.txt"), ROOT / "Makefile"]:
        shutil.copy(path, folder)
    return folder


def first_failure(copy: Path, tests: Iterable[str], marks: str) -> str | None:
    """Run the tests of a copy that have these marks, up to the first that fails; return its id."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRIVET_", "PYTEST_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**environment, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if ran.returncode in {0, NO_TEST_SELECTED}:
        return None
    found = (line.split(" ", 1)[1] for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    lines = [line.split(" - ")[0] for line in found]  # the id of a test may have spaces
    return lines[0] if lines else f"exit code {ran.returncode}"


def runs_of(mutant: Mutant, named: bool) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return the runs to try in order: the command that each belongs to, its marks, and its tests (none: all)."""
    commands = (("make test", FAST), ("make test-all", SLOW))
    selections = (mutant.tests,) if named else (mutant.tests, ())
    return [(command, marks, tests) for command, marks in commands for tests in selections]


def try_mutant(mutant: Mutant, named: bool) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = copy_of_the_sources(Path(folder))
        file = copy / mutant.file
        sound = file.read_text()
        caught_by, test = None, None
        for command, marks, tests in runs_of(mutant, named):
            file.write_text(sound.replace(mutant.before, mutant.after))
            test = first_failure(copy, tests, marks)
            file.write_text(sound)
            if test is not None and first_failure(copy, [test] if "::" in test else tests, marks) is None:
                caught_by = command
                break
    return Outcome(mutant.name, mutant.room, mutant.what, caught_by, test, round(time.monotonic() - started, 1))


def print_row(outcome: Outcome) -> None:
    cells = (outcome.what, outcome.room, outcome.caught_by or "**nothing**", outcome.test or "")
    print(f"| {' | '.join(cells)} | {outcome.seconds:.0f} |", flush=True)


def print_sums(outcomes: Sequence[Outcome]) -> None:
    fast = sum(outcome.caught_by == "make test" for outcome in outcomes)
    every = sum(outcome.caught_by is not None for outcome in outcomes)
    print(f"\n{len(outcomes)} faults: make test caught {fast}, make test-all {every}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these faults only")
    parser.add_argument("--named", action="store_true", help="run only the tests that a fault names")
    parser.add_argument("--out", type=Path, help="write the outcomes there, as JSON")
    parser.add_argument("--at-a-time", type=int, default=1)
    options = parser.parse_args()
    mutants = read_mutants(Path(__file__).with_name("mutants.toml"))
    wanted = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    outcomes = []
    print("| fault | room | caught by | test | s |\n|---|---|---|---|--:|")
    with ThreadPoolExecutor(options.at_a_time) as pool:
        for trial in as_completed(pool.submit(try_mutant, mutant, options.named) for mutant in wanted):
            outcomes.append(trial.result())
            print_row(outcomes[-1])
            if options.out:
                options.out.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print_sums(outcomes)


if __name__ == "__main__":
    main()
