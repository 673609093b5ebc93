"""Checks whether uploaded arrays hold what the spec says of them, by their headers. Labels are read by ranks alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from service.jobs.plugins import DataConfig
from service.jobs.records import Problem
from service.jobs.spec.data import FileArrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from service.formats.arrays import Stored

EXPECTED = "safetensors, or npz as numpy.savez(FILE, inputs=…, targets=…) writes it"


def check_samples(
    data: DataConfig, path: str, path_of: Callable[[str], Path | None], *, count: int | None = None
) -> Iterator[Problem]:
    """Yield why ranks could not take samples from the upload that ``data`` names, the spec's field ``path``: the first
    ``count`` ones to test with, or where it is None, some to learn from.
    """
    if not isinstance(data, FileArrays):
        return
    from service.formats.arrays import headers  # noqa: PLC0415 - brings numpy, which only these jobs need

    held: dict[str, Mapping[str, Stored]] = {}
    for field, file in (("file", data.file), ("test_file", data.test_file)):
        if file is not None and (content := path_of(file)) is not None:
            try:
                held[field] = headers(content, f"data.{field}")
            except ValueError as error:
                yield _problem(f"{path}.{field}", error, file)
                return
    if "file" in held and (data.test_file is None or "test_file" in held):
        yield from _check_splits(data, path, held, count)


def _problem(path: str, error: ValueError, file: str) -> Problem:
    """Return the refusal in the words of ranks, which name the field as ``path`` does."""
    words = re.sub(
        r"^(data\.(test_)?file: )?(data\.(test_)?file )?", lambda at: "the file " if at[3] else "", str(error)
    )
    return Problem(path, words, file, EXPECTED)


def _check_splits(
    data: FileArrays, path: str, held: Mapping[str, Mapping[str, Stored]], count: int | None
) -> Iterator[Problem]:
    from service.formats.arrays import TEST, count_samples, has_test_split, held_out  # noqa: PLC0415 - as above

    field, file = "file", data.file
    try:
        whole = count_samples(held["file"], data, "", "data.file")
        own = has_test_split(held["file"], data)
        if data.test_file is not None:
            field, file = "test_file", data.test_file
            tests = count_samples(held["test_file"], data, "", "data.test_file")
        else:
            tests = count_samples(held["file"], data, TEST, "data.file") if own else held_out(whole, data)
    except ValueError as error:
        yield _problem(f"{path}.{field}", error, file)
        return
    divided = data.test_file is None and not own
    if count is None and divided and tests == whole:
        message = f"all {whole} samples are for testing, and none is left to learn from"
        yield Problem(f"{path}.test_fraction", message, data.test_fraction, "less than 1")
    elif count is not None and count > tests:
        message = f"the test split has {tests} samples"
        expected = f"at most {tests}"
        if divided and count <= whole:
            message += f", the last of {whole}"
            expected += f", or {path}.test_fraction: 1 for all {whole}"
        yield Problem(path.removesuffix("data") + "count", message, count, expected)
