"""Makes tables of plain Python rows.

pyarrow would make the same tables, but first imports pandas, if installed, to recognise pandas's own values:
half a second at the end of a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow

_NUMBERS = {pyarrow.int64(): np.int64, pyarrow.float64(): np.float64}


def table(rows: Sequence[Mapping[str, Any]], schema: pyarrow.Schema) -> pyarrow.Table:
    """Return the table of rows, whose fields are whole numbers, numbers, texts or lists of these, or ``None``. A
    field missing from a row is ``None``; a field missing from the schema is left out.
    """
    columns = [_column([row.get(field.name) for row in rows], field.type) for field in schema]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _column(values: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    is_there = np.array([value is not None for value in values], dtype=bool)
    there = None if is_there.all() else _buffer(np.packbits(is_there, bitorder="little"))
    if kind in _NUMBERS:
        numbers = np.array([0 if value is None else value for value in values], dtype=_NUMBERS[kind])
        return pyarrow.Array.from_buffers(kind, len(values), [there, _buffer(numbers)])
    if pyarrow.types.is_list(kind):
        items = [value or () for value in values]
        child = _column([each for item in items for each in item], kind.value_type)
        return pyarrow.Array.from_buffers(kind, len(values), [there, _offsets(items)], children=[child])
    if kind != pyarrow.string():
        raise TypeError(f"no column of plain values is {kind}")
    texts = [(value or "").encode() for value in values]
    content = pyarrow.py_buffer(b"".join(texts))
    return pyarrow.Array.from_buffers(kind, len(values), [there, _offsets(texts), content])


def _offsets(items: Sequence[Sequence[Any]]) -> pyarrow.Buffer:
    return _buffer(np.cumsum([0, *map(len, items)], dtype=np.int32))


def _buffer(numbers: np.ndarray[Any, Any]) -> pyarrow.Buffer:
    return pyarrow.py_buffer(numbers.tobytes())
