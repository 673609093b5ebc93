"""The planted faults of ``benchmarks/mutants.py`` fit the sources and the tests of today."""

from __future__ import annotations

from pathlib import Path

from benchmarks.mutants import ROOT, read_mutants

FAULTS = Path(__file__).parents[1] / "benchmarks" / "mutants.toml"


def test_every_planted_fault_has_its_line_and_its_tests() -> None:
    mutants = read_mutants(FAULTS)  # refuses a line that is not there once
    assert [each.name for each in mutants if each.before == each.after or not each.tests] == []
    files = {test.partition("::")[0] for each in mutants for test in each.tests}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
