"""Makes pyarrow tables of the client's results; ``to_pandas()`` makes a data frame of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from service.jobs.records import ListedJob

if TYPE_CHECKING:
    import pyarrow as pa

_FACTS = ("id", "kind", "name", "state", "owner", "project", "created_at", "started_at", "ended_at")


def jobs(found: Iterable[ListedJob]) -> pa.Table:
    """Return a row for each job: its facts, labels, swept fields (``parameters.seed``) and result."""
    return _table([_row(job) for job in found])


def metrics(series: Mapping[str, Mapping[str, Sequence[Any]]]) -> pa.Table:
    """Return a row for each point of the curves from :meth:`trivet.Client.metrics`: ``metric``, ``step``,
    ``time`` and ``value``.
    """
    return _table(
        [
            {"metric": name, "step": step, "time": time, "value": value}
            for name, points in series.items()
            for step, time, value in zip(points["step"], points["time"], points["value"], strict=True)
        ]
    )


def bounds(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return a row for each instance of a verification; lists of bounds are columns of lists."""
    return _table([dict(row) for row in rows])


def _row(job: ListedJob) -> dict[str, Any]:
    facts = {name: getattr(job, name) for name in _FACTS}
    swept = {f"parameters.{path}": value for path, value in (job.parameters or {}).items()}
    labels = {f"labels.{name}": value for name, value in job.labels.items()}
    return facts | labels | swept | dict(_flat(job.result or {}, "result"))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{path}.{name}")


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415 - takes a tenth of a second, which most programs need not spend

    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column(pa, [row.get(name) for row in rows]) for name in names})


def _column(pa: Any, values: list[Any]) -> Any:
    """Return values as an array: numbers of any sort as one type, and values without a common type as JSON."""
    if any(isinstance(value, float) for value in values) and all(_is_number(value) for value in values):
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.array([None if value is None else orjson.dumps(value).decode() for value in values])


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
