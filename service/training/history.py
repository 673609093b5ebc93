"""Keeps every metric of a run, over attempts, as a Parquet file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from service.jobs.files import atomic_write, set_aside
from service.jobs.runtime import plain_tables

Row = dict[str, float]
_LOSS = "loss"
"""A metric of every step that ran."""
_EVALUATION = "eval_"
"""The prefix of an evaluation's metrics."""


class History:
    """Rows of ``step`` (int64), ``time`` (Unix seconds) and one float64 column per metric, null where absent."""

    def __init__(self, path: Path, resumed_step: int, attempts: Path | None = None, *, evaluated: bool = False) -> None:
        """Read the file at ``path`` if there is one, up to and including ``resumed_step``: later steps run again.

        Steps that it lacks, as it was written after the checkpoint or cannot be read, come from the events that earlier
        attempts recorded below ``attempts``; so does the evaluation of ``resumed_step``, if one was due
        (``evaluated``), since the file is written before it. A file that cannot be read is set aside;
        :attr:`unreadable` then says why. Drafts of an attempt that was killed while it wrote are removed.
        """
        self.path = path
        self.unreadable: str | None = None
        rows: dict[float, Row] = {}
        for draft in path.parent.glob(f".{path.name}.*.part") if resumed_step else ():
            draft.unlink(missing_ok=True)
        if resumed_step and path.is_file():
            rows = {row["step"]: row for row in self._stored()}
        lacks_steps = any(step not in rows for step in range(1, resumed_step + 1))
        lacks_evaluation = evaluated and not _is_evaluated(rows.get(resumed_step, {}))
        if resumed_step and attempts is not None and (lacks_steps or lacks_evaluation):
            rows = _merged(_recorded(attempts), rows)
        self.rows: list[Row] = [rows[step] for step in sorted(rows) if step <= resumed_step]

    def has_evaluation(self, step: int) -> bool:
        """Return whether the newest row belongs to this step and has the metrics of an evaluation."""
        return bool(self.rows) and self.rows[-1]["step"] == step and _is_evaluated(self.rows[-1])

    def _stored(self) -> list[Row]:
        try:
            table = pq.read_table(self.path)
            table.schema.field("step"), table.schema.field("time")
        except (pa.ArrowException, OSError, KeyError) as error:
            aside = set_aside(self.path)
            self.unreadable = f"{self.path.name} cannot be read ({error}); it is now {aside.name}"
            return []
        rows: list[Row] = table.to_pylist()
        return rows

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; a second call for the newest step adds to its row."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step, "time": time.time()})
        self.rows[-1].update(values)

    def write(self) -> None:
        """Replace the file atomically, so that neither a reader nor the next start after a crash sees half of it."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        kinds = [(name, pa.int64() if name == "step" else pa.float64()) for name in names]
        table = plain_tables.table(self.rows, pa.schema(kinds))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = pa.BufferOutputStream()
        pq.write_table(table, written)
        atomic_write(self.path, written.getvalue().to_pybytes())


def _is_evaluated(row: Row) -> bool:
    return any(name.startswith(_EVALUATION) and value is not None for name, value in row.items())


def _merged(recorded: dict[float, Row], stored: dict[float, Row]) -> dict[float, Row]:
    """Return the rows by step: stored ones, and recorded ones for the steps that are missing there."""
    present = {step: {name: value for name, value in row.items() if value is not None} for step, row in stored.items()}
    return recorded | {step: {**recorded.get(step, {}), **row} for step, row in present.items()}


def _recorded(attempts: Path) -> dict[float, Row]:
    """Return the recorded metrics by step; of a step that ran twice, those of the later attempt that ran it.

    What else an attempt reports of a step adds to its row: how the ranks of other stages use their modules, and an
    evaluation that is made up for.
    """
    rows: dict[float, Row] = {}
    files = sorted(attempts.glob("*/events*.jsonl"), key=lambda path: (int(path.parent.name), path.name))
    for _, own in groupby(files, key=lambda path: path.parent):
        found: dict[float, Row] = {}
        for event in chain.from_iterable(map(_metrics, own)):
            row = found.setdefault(event["step"], {"step": event["step"], "time": event["time"]})
            row.update(event["values"])
        for step, row in found.items():
            ran = {} if _LOSS in row else rows.get(step, {})
            rows[step] = ran | row | {"time": ran.get("time", row["time"])}
    return rows


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for line in lines:
            if b'"metric"' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:  # torn when the attempt ended
                continue
            if event.get("type") == "metric":
                yield event
