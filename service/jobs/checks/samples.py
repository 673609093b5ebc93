"""Checks whether uploaded samples are what the spec says of them, by sizes and headers. Only ranks read the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from service.jobs.plugins import DataConfig
from service.jobs.records import Problem
from service.jobs.spec.data import FileArrays, FileTokens

_EXPECTED = {
    "arrays": "safetensors, or npz as numpy.savez(FILE, inputs=…, targets=…) writes it",
    "tokens": "one row of whole numbers of the type that encoding names, longer than sequence",
}


@dataclass(frozen=True)
class _Counted:
    """The samples of ``file``, and those to test with, which are the end of ``file`` where it is ``divided``."""

    whole: int
    tests: int
    divided: bool


def check_samples(
    data: DataConfig, path: str, path_of: Callable[[str], Path | None], *, count: int | None = None
) -> Iterator[Problem]:
    """Yield why ranks could not take samples from the upload that ``data`` names, the spec's field ``path``: the first
    ``count`` ones to test with, or where it is None, some to learn from.
    """
    if not isinstance(data, FileArrays | FileTokens):
        return
    files = {"file": data.file} | ({} if data.test_file is None else {"test_file": data.test_file})
    places = {field: place for field, file in files.items() if (place := path_of(file)) is not None}
    if isinstance(data, FileTokens) and data.encoding == "text":  # only ranks count its tokens
        if count is None and data.test_fraction == 1 and data.test_file is None:
            yield _nothing_to_learn_from(path)
        return
    if len(places) < len(files):
        return
    try:
        found = _count_arrays(data, places) if isinstance(data, FileArrays) else _count_tokens(data, places)
    except ValueError as error:  # in the words of ranks, which begin with the field
        at, _, words = str(error).partition(" ")
        field = at.removeprefix("data.").rstrip(":")
        told = words if at.endswith(":") else f"the file {words}"
        yield Problem(f"{path}.{field}", told, files[field], _EXPECTED[data.format])
        return
    if count is None and found.divided and found.tests == found.whole:
        yield _nothing_to_learn_from(path)
    elif count is not None and count > found.tests:
        yield _too_few(found, path, count)


def _count_arrays(data: FileArrays, places: Mapping[str, Path]) -> _Counted:
    # Imported here and below, as they bring numpy, which only these jobs need.
    from service.formats.arrays import TEST, count_samples, has_test_split, headers, held_out  # noqa: PLC0415

    held = headers(places["file"], "data.file")
    whole, own = count_samples(held, data, "", "data.file"), has_test_split(held, data)
    if "test_file" in places:
        tests = count_samples(headers(places["test_file"], "data.test_file"), data, "", "data.test_file")
        return _Counted(whole, tests, divided=False)
    if own:
        return _Counted(whole, count_samples(held, data, TEST, "data.file"), divided=False)
    return _Counted(whole, held_out(whole, data.test_fraction, f"data.file holds {whole} samples"), divided=True)


def _count_tokens(data: FileTokens, places: Mapping[str, Path]) -> _Counted:
    from service.formats.arrays import held_out  # noqa: PLC0415 - as above
    from service.formats.tokens import count_ids, count_sequences  # noqa: PLC0415 - as above

    counts = {}
    for field, place in places.items():
        named = f"data.{field}"
        counts[field] = count_sequences(count_ids(place, data.encoding, named), data, named)
    whole = counts["file"]
    if "test_file" in counts:
        return _Counted(whole, counts["test_file"], divided=False)
    return _Counted(
        whole,
        held_out(whole, data.test_fraction, f"data.file holds {whole} sequences of {data.sequence}"),
        divided=True,
    )


def _nothing_to_learn_from(path: str) -> Problem:
    return Problem(f"{path}.test_fraction", "all samples are for testing, and none is left to learn from", 1, "below 1")


def _too_few(found: _Counted, path: str, count: int) -> Problem:
    message, expected = f"the test split has {found.tests} samples", f"at most {found.tests}"
    if found.divided and count <= found.whole:
        message += f", the last of {found.whole}"
        expected += f", or {path}.test_fraction: 1 for all {found.whole}"
    return Problem(path.removesuffix("data") + "count", message, count, expected)
