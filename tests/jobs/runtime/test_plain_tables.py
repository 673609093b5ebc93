"""Tables of plain rows are those that pyarrow makes, without a look for pandas."""

from __future__ import annotations

import subprocess
import sys
from math import inf
from typing import Any

import pyarrow
import pytest

from service.jobs.runtime.plain_tables import table

SCHEMA = pyarrow.schema(
    [
        ("step", pyarrow.int64()),
        ("loss", pyarrow.float64()),
        ("name", pyarrow.string()),
        ("ends", pyarrow.list_(pyarrow.float64())),
    ]
)
ROWS: list[dict[str, Any]] = [
    {"step": 2**53 + 1, "loss": -inf, "name": "ö", "ends": [0.5, inf], "besides": 1},
    {"step": None, "loss": 1, "name": "", "ends": []},
    {"name": None, "ends": None},
]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [], ROWS * 5])
def test_the_same_as_pyarrows(rows: list[dict[str, Any]]) -> None:
    made = table(rows, SCHEMA)
    made.validate(full=True)
    assert made.equals(pyarrow.Table.from_pylist(rows, SCHEMA))


def test_pandas_is_not_looked_for() -> None:
    program = "\n".join(
        [
            "import io, sys, pyarrow",
            "from pyarrow import parquet",
            "from service.jobs.runtime.plain_tables import table",
            "class Finder:",
            "    def find_spec(name, path=None, target=None):",
            "        assert name != 'pandas'",
            "sys.meta_path.insert(0, Finder)",
            "schema = pyarrow.schema([('name', pyarrow.string()), ('loss', pyarrow.float64())])",
            "parquet.write_table(table([{'name': 'a', 'loss': 1.0}], schema), io.BytesIO())",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_other_columns_are_refused() -> None:
    with pytest.raises(TypeError, match="bool"):
        table([{"is": True}], pyarrow.schema([("is", pyarrow.bool_())]))
