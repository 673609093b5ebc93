"""Every metric of a run, kept over attempts as a Parquet file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


class History:
    """Rows of ``step`` (int64), ``time`` (Unix seconds) and one float64 column per metric, null where absent."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Take up the file at ``path`` if there is one, up to and including ``resumed_step``: later steps run again."""
        self.path = path
        self.rows: list[dict[str, float]] = []
        if resumed_step and path.is_file():
            self.rows = [row for row in pq.read_table(path).to_pylist() if row["step"] <= resumed_step]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one step; a second call for the newest step adds to its row."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step, "time": time.time()})
        self.rows[-1].update(values)

    def write(self) -> None:
        """Replace the file in one step, so that a reader never sees half of it."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        kinds = [(name, pa.int64() if name == "step" else pa.float64()) for name in names]
        table = pa.Table.from_pylist(self.rows, schema=pa.schema(kinds))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        working = self.path.with_name(f".{self.path.name}")
        pq.write_table(table, working)
        working.replace(self.path)
