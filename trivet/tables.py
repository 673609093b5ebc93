"""Makes tables of the client's results: rows of plain values, which CSV can hold, and pyarrow tables of them, of which
``to_pandas()`` makes a data frame.

Mappings become columns with dotted names; lists become JSON, since CSV has no others.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from service.jobs.records import ListedJob

Row = dict[str, Any]
_FACTS = ("id", "kind", "name", "state", "owner", "project", "created_at", "started_at", "ended_at")


def jobs(found: Iterable[ListedJob]) -> pa.Table:
    """Return a row for each job: its facts, labels, swept fields (``parameters.seed``) and result."""
    return _table(job_rows(found))


def metrics(series: Mapping[str, Mapping[str, Sequence[Any]]]) -> pa.Table:
    """Return a row for each point of the curves from :meth:`trivet.Client.metrics`: ``metric``, ``step``,
    ``time`` and ``value``.
    """
    return _table(metric_rows(series))


def bounds(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return a row for each instance of a verification."""
    return _table(bound_rows(rows))


def compare(found: Iterable[ListedJob]) -> pa.Table:
    """Return a row for each job, as ``client.jobs(include="spec", …)`` yields them: the fields in which their specs
    differ, and their results.
    """
    return _table(compared_rows(found))


def job_rows(found: Iterable[ListedJob]) -> list[Row]:
    return [_row(job) for job in found]


def metric_rows(series: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[Row]:
    return [
        {"metric": name, "step": step, "time": time, "value": value}
        for name, points in series.items()
        for step, time, value in zip(points["step"], points["time"], points["value"], strict=True)
    ]


def bound_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [{name: value for key, cell in row.items() for name, value in _flat(cell, key)} for row in rows]


def compared_rows(found: Iterable[ListedJob]) -> list[Row]:
    every = list(found)
    specs = [dict(_flat(job.spec or {}, "spec")) for job in every]
    names = dict.fromkeys(name for spec in specs for name in spec)
    differing = [name for name in names if any(spec.get(name) != specs[0].get(name) for spec in specs)]
    return [
        {"id": job.id, "name": job.name, "state": job.state}
        | {name.removeprefix("spec."): spec.get(name) for name in differing if name != "spec.name"}
        | _computer(job)
        | dict(_flat(job.result or {}, "result"))
        for job, spec in zip(every, specs, strict=True)
    ]


def csv_text(rows: Sequence[Row]) -> str:
    """Return rows as CSV (RFC 4180, with line feeds); without rows, nothing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(rows), restval=None, lineterminator="\n")
    if rows:
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def columns(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns, in the order in which rows have them."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _row(job: ListedJob) -> Row:
    facts = {name: getattr(job, name) for name in _FACTS}
    swept = {f"parameters.{path}": _plain(value) for path, value in (job.parameters or {}).items()}
    labels = {f"labels.{name}": value for name, value in job.labels.items()}
    return facts | labels | swept | _computer(job) | dict(_flat(job.result or {}, "result"))


def _computer(job: ListedJob) -> Row:
    """Return what computed the newest attempt."""
    if not job.computed_by:
        return {}
    return {f"computed_by.{name}": value for name, value in job.computed_by[-1].facts().items()}


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, _plain(value)
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{path}.{name}")


def _plain(value: Any) -> Any:
    return _json(value) if isinstance(value, list | tuple | Mapping) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _table(rows: list[Row]) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415 - takes a tenth of a second, which most programs need not spend

    return pa.table({name: _column(pa, [row.get(name) for row in rows]) for name in columns(rows)})


def _column(pa: Any, values: list[Any]) -> Any:
    """Return values as an array: numbers of any sort as one type, and values without a common type as JSON."""
    if any(isinstance(value, float) for value in values) and all(_is_number(value) for value in values):
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.array([None if value is None else _json(value) for value in values])


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
