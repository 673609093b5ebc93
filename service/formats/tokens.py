"""How many token ids an uploaded row of them has, by its size or header, and how many sequences these make."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from service.formats.arrays import BROKEN, check_claim
from service.jobs.spec.data import FileTokens


def count_ids(path: Path, encoding: str, field: str) -> int:
    """Return the number of ids. Raises ``ValueError`` that names the ``field`` if the file is no row of numbers."""
    size = path.stat().st_size
    if encoding != "npy":
        kind = np.dtype(encoding)
        if size % kind.itemsize:
            raise ValueError(f"{field} has {size} bytes, which are no whole number of {encoding} ids")
        return size // kind.itemsize
    try:
        with path.open("rb") as file:
            shape, kind = check_claim(file, size)
    except BROKEN as error:
        raise ValueError(f"{field} is no array in NumPy's format: {error}") from error
    if len(shape) != 1 or kind.kind not in "iu":
        raise ValueError(f"{field} holds {kind} of shape {shape}; expected one row of integers")
    return shape[0]


def count_sequences(ids: int, spec: FileTokens, field: str) -> int:
    """Return the number of samples; the last target of one begins the next. ``ValueError`` if there is none."""
    if ids <= spec.sequence:
        raise ValueError(
            f"{field} holds {ids} tokens; data.sequence={spec.sequence} needs at least {spec.sequence + 1}"
        )
    return (ids - 1) // spec.sequence
