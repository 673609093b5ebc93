"""The rows as a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from service.verification.ledger import Row

MEDIA_TYPE = "application/vnd.apache.parquet"
NAME = "bounds.parquet"
_NUMBERS = pyarrow.list_(pyarrow.float64())
SCHEMA = pyarrow.schema(
    [
        ("instance", pyarrow.int64()),
        ("name", pyarrow.string()),
        ("label", pyarrow.int64()),
        ("prediction", pyarrow.int64()),
        ("verdict", pyarrow.string()),
        ("lower", _NUMBERS),
        ("upper", _NUMBERS),
        ("margin", pyarrow.float64()),
        ("method", pyarrow.string()),
        ("decided_by", pyarrow.string()),
        ("reason", pyarrow.string()),
        ("seconds", pyarrow.float64()),
        ("domains", pyarrow.int64()),
        ("counterexample", _NUMBERS),
        ("counterexample_outputs", _NUMBERS),
        ("onnxruntime_outputs", _NUMBERS),
    ]
)


def write(rows: Sequence[Row], folder: Path) -> Path:
    """Write ``folder/bounds.parquet``, which appears only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    working = folder / f".{NAME}.unfinished"
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), SCHEMA), working)
    return working.rename(target)
