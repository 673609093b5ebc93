"""The rows as a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pyarrow
from pyarrow import parquet

from service.jobs.atomic import atomic_draft
from service.jobs.bounds_row import BoundsRow

MEDIA_TYPE = "application/vnd.apache.parquet"
NAME = "bounds.parquet"
_COLUMNS = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}


def _column(annotation: Any) -> pyarrow.DataType:
    """Return the type of the column for a field with this annotation; every column may hold null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return _column(kind)
    if origin is Literal:
        return _column(type(arguments[0]))
    return pyarrow.list_(_column(arguments[0])) if origin is list else _COLUMNS[annotation]


SCHEMA = pyarrow.schema([(name, _column(annotation)) for name, annotation in get_type_hints(BoundsRow).items()])


def write(rows: Sequence[BoundsRow], folder: Path) -> Path:
    """Write ``folder/bounds.parquet``, which appears only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    with atomic_draft(target) as draft:
        parquet.write_table(pyarrow.Table.from_pylist([row.as_dict() for row in rows], SCHEMA), draft)
    return target
