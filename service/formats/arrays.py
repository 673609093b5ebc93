"""What files of labelled samples hold, by the headers of their arrays: whether they are what the spec says of them, and
how many samples there are to test with. Ranks ask the same of what they have read.
"""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from service.formats.weights import TensorHeaderError, tensors_in
from service.jobs.plugins import Features
from service.jobs.spec.data import FileArrays

BROKEN = (
    ValueError,
    TypeError,
    EOFError,
    OSError,
    RuntimeError,
    LookupError,  # of a type that is an empty tuple
    SyntaxError,  # of lines that Python cannot indent, and of lists of types
    SystemError,  # of Python 3.12, whose tokenizer accepts the null bytes of a header
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""The errors of reading a broken file."""
_HEADERS: Mapping[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = (
    MappingProxyType({(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0})
)
"""The third version has names of fields, which arrays of numbers lack."""
INPUTS, TARGETS, TEST = "inputs", "targets", "test_"
_LARGEST_NPZ = 2**34
"""The most bytes of all arrays of an npz file, which is read as a whole; a safetensors file has no limit."""


_MOST_NAMED = 10


@dataclass(frozen=True)
class ArrayHeader:
    """An array by its header: ``kind`` is the name of its numbers' type."""

    shape: tuple[int, ...]
    kind: str
    real: bool
    whole: bool


def check_claim(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Compare the header that ``file`` of ``size`` bytes begins with to that size, before memory is taken for it.

    Returns the shape and the type. Raises one of :data:`BROKEN`.
    """
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is none for numbers")
    try:
        shape, _, kind = _HEADERS[version](file)
    except MemoryError as error:  # so Python's parser says it; a header is short
        raise ValueError("its header is nested too deeply") from error
    held = size - file.tell()
    if min(shape, default=0) < 0 or prod(shape) * kind.itemsize > held:
        raise ValueError(f"its header claims shape {shape} of {kind}, which the {held} bytes after it do not hold")
    return shape, kind


def is_npz(path: Path) -> bool:
    """Return whether the file is no safetensors file but a zip, as npz is."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def headers(path: Path, field: str) -> Mapping[str, ArrayHeader]:
    """Return the arrays of a safetensors or npz file by name. Raises ``ValueError`` that names the ``field``."""
    if is_npz(path):
        try:
            return {name: _header_of(*header) for name, header in npz_headers(path).items()}
        except BROKEN as error:
            raise ValueError(f"{field} is no npz file of numbers: {error}") from error
    try:
        with path.open("rb") as content:
            held = tensors_in(content, path.stat().st_size)
    except (TensorHeaderError, OSError) as error:
        raise ValueError(f"{field} is neither safetensors nor npz") from error
    return {name: _header_of_tensor(*header) for name, header in held.items()}


def _header_of_tensor(shape: tuple[int, ...], kind: str) -> ArrayHeader:
    whole = kind.startswith(("I", "U"))
    return ArrayHeader(shape, kind, real=whole or kind.startswith(("F", "BF")), whole=whole or kind == "BOOL")


def npz_headers(path: Path) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and type of each array, by name. Raises one of :data:`BROKEN`."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        if size > _LARGEST_NPZ:
            raise ValueError(f"its arrays have {size} bytes, an npz file may have {_LARGEST_NPZ}; use safetensors")
        found = {}
        for member in members:
            with archive.open(member) as content:
                try:
                    found[member.filename.removesuffix(".npy")] = check_claim(content, member.file_size)
                except BROKEN as error:
                    raise ValueError(f"{member.filename}: {error}") from error
    return found


def _header_of(shape: tuple[int, ...], kind: np.dtype[Any]) -> ArrayHeader:
    return ArrayHeader(shape, str(kind), real=kind.kind in "fiu", whole=kind.kind in "iub")


def count_samples(arrays: Mapping[str, ArrayHeader], spec: FileArrays, prefix: str, field: str) -> int:
    """Return the length of one split; ``ValueError`` if its arrays do not agree with the spec or with each other."""
    names = (prefix + INPUTS, prefix + TARGETS)
    missing = [name for name in names if name not in arrays]
    if missing:
        others = sorted(arrays)[:_MOST_NAMED]
        raise ValueError(f"{field} has no array {missing[0]!r}, but {', '.join(others) or 'none'}")
    inputs, targets = (arrays[name] for name in names)
    _check_inputs(inputs, spec, f"{field}: {names[0]}")
    if len(targets.shape) != 1 or not targets.whole or targets.shape[0] != inputs.shape[0]:
        got = f"{targets.kind} of shape {targets.shape}"
        raise ValueError(
            f"{field}: {names[1]} is {got}; expected one whole number for each of {inputs.shape[0]} inputs"
        )
    return inputs.shape[0]


def _check_inputs(inputs: ArrayHeader, spec: FileArrays, what: str) -> None:
    if not inputs.real:
        raise ValueError(f"{what} are {inputs.kind}; expected real numbers")
    stored = Features(prod(spec.shape), spec.classes, shape=spec.shape)
    if len(inputs.shape) < 2 or not inputs.shape[0] or not stored.holds(inputs.shape[1:]):
        raise ValueError(
            f"{what} have shape {inputs.shape}; data.shape says (n, {str(spec.shape)[1:]}, which is the shape "
            "of a sample as it is stored (data.axes moves its axes)"
        )


def has_test_split(names: Mapping[str, object], spec: FileArrays) -> bool:
    """Return whether the file has arrays of a test split.

    Raises ``ValueError`` if it has others of almost that name, or the spec names another file for it.
    """
    known = (TEST + INPUTS, TEST + TARGETS)
    found = sorted(name for name in names if name.lower().startswith("test"))
    if foreign := [name for name in found if name not in known]:
        raise ValueError(f"data.file has an array {foreign[0]!r}; expected {' and '.join(known)} for a test split")
    if found and spec.test_file is not None:
        raise ValueError("data.test_file: data.file has a test split of its own (test_inputs); expected one of them")
    return bool(found)


def held_out(samples: int, test_fraction: float, what: str) -> int:
    """Return how many of ``samples``, the last ones, are for testing where a file has no test split of its own. Raises
    ``ValueError``, which begins with ``what``, if none is left to train on.
    """
    held = max(int(samples * test_fraction), 1)
    if held == samples and test_fraction < 1:
        raise ValueError(f"{what}: too few for a test split")
    return held
