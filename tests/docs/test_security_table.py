"""Each row of who can do what to whom has tests, which there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run" / "security.md"
TABLE = PAGE.read_text().partition("## Who can do what to whom")[2].partition("\n## ")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) > 20
    for row in ROWS:
        found = TEST.findall(row)
        assert found, row
        for file, name in found:
            text = (ROOT / file).read_text()
            assert not name or f"\ndef {name}(" in text, f"{file} has no {name}"
