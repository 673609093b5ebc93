"""Labelled samples in named arrays of untrusted files."""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.jobs.plugins import Features
from service.jobs.spec.data import FileArrays
from service.models.data.sources import OnDisk, Split, count_for_training

BROKEN = (
    ValueError,
    TypeError,
    EOFError,
    OSError,
    RuntimeError,
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


def check_claim(file: IO[bytes], size: int) -> None:
    """Compare the header that ``file`` of ``size`` bytes begins with to that size, before memory is taken for it.

    Raises one of :data:`BROKEN`.
    """
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is none for numbers")
    shape, _, kind = _HEADERS[version](file)
    claimed = prod(shape) * kind.itemsize
    if min(shape, default=0) < 0 or claimed > size:
        raise ValueError(f"its header claims shape {shape} of {kind}, which {size} bytes do not hold")


INPUTS, TARGETS, TEST = "inputs", "targets", "test_"
_LARGEST_NPZ = 2**34
"""The most bytes of all arrays of an npz file, which is read as a whole; a safetensors file has no limit."""


@dataclass(frozen=True)
class ArraySamples(OnDisk):
    """Inputs ``(n, …)`` of any real type, made float32 on request, with their axes in order and then flat; int64 labels
    ``(n,)``.
    """

    inputs: Tensor
    labels: Tensor
    spec: FileArrays

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sequence(self) -> int | None:
        return None

    def take(self, indices: Tensor) -> Split:
        indices = indices.cpu()
        inputs = self.inputs[indices]
        if self.spec.axes is not None:
            inputs = inputs.reshape(-1, *self.spec.shape).permute(0, *(axis + 1 for axis in self.spec.axes))
        inputs = inputs.flatten(1)
        scaled = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs.float()
        return Split(scaled, self.labels[indices])


def read(path: Path, field: str) -> Mapping[str, Tensor]:
    """Return the arrays of a file: those of safetensors are mapped, those of npz are read. Pickles are never loaded."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return _read_npz(path, field) if is_zip else _map_safetensors(path, field)


def samples(arrays: Mapping[str, Tensor], spec: FileArrays, prefix: str, field: str) -> ArraySamples:
    """Return one split; ``ValueError`` if its arrays do not agree with the spec or with each other."""
    names = (prefix + INPUTS, prefix + TARGETS)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{field} has no array {missing[0]!r}, but {', '.join(sorted(arrays)) or 'none'}")
    inputs, targets = (arrays[name] for name in names)
    _check_inputs(inputs, spec, f"{field}: {names[0]}")
    is_whole = not (targets.is_floating_point() or targets.is_complex())
    if targets.dim() != 1 or not is_whole or len(targets) != len(inputs):
        got = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"{field}: {names[1]} is {got}; expected one whole number for each of {len(inputs)} inputs")
    labels = targets.long()
    if int(labels.min()) < 0 or int(labels.max()) >= spec.classes:
        got = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"{field}: {names[1]} are {got}; data.classes={spec.classes} allows 0 to {spec.classes - 1}")
    return ArraySamples(inputs, labels, spec)


def has_test_split(arrays: Mapping[str, Tensor], field: str) -> bool:
    """Return whether the file has arrays of a test split; ``ValueError`` if it has others of almost that name."""
    known = (TEST + INPUTS, TEST + TARGETS)
    found = sorted(name for name in arrays if name.lower().startswith("test"))
    if foreign := [name for name in found if name not in known]:
        raise ValueError(f"{field} has an array {foreign[0]!r}; expected {' and '.join(known)} for a test split")
    return bool(found)


def divide(whole: ArraySamples, test_fraction: float) -> tuple[ArraySamples, ArraySamples]:
    """Divide into training and test split: the latter is the last ``test_fraction``, one sample at least."""
    rest = count_for_training(len(whole), test_fraction, f"data.file holds {len(whole)} samples")
    return (
        replace(whole, inputs=whole.inputs[:rest], labels=whole.labels[:rest]),
        replace(whole, inputs=whole.inputs[rest:], labels=whole.labels[rest:]),
    )


def _check_inputs(inputs: Tensor, spec: FileArrays, what: str) -> None:
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise ValueError(f"{what} are {inputs.dtype}; expected real numbers")
    stored = Features(prod(spec.shape), spec.classes, shape=spec.shape)
    if inputs.dim() < 2 or not len(inputs) or not stored.holds(inputs.shape[1:]):
        raise ValueError(
            f"{what} have shape {tuple(inputs.shape)}; data.shape says (n, {str(spec.shape)[1:]}, which is the shape "
            "of a sample as it is stored (data.axes moves its axes)"
        )


def _map_safetensors(path: Path, field: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{field} is neither safetensors nor npz: {error}") from error


def _read_npz(path: Path, field: str) -> dict[str, Tensor]:
    try:
        _check_members(path)
        with np.load(path, allow_pickle=False) as arrays:
            return {
                name: torch.from_numpy(np.ascontiguousarray(arrays[name], dtype=arrays[name].dtype.newbyteorder("=")))
                for name in arrays.files
            }
    except BROKEN as error:
        raise ValueError(f"{field} is no npz file of numbers: {error}") from error
    except MemoryError as error:
        raise ValueError(f"{field} holds arrays too large for this machine's memory; use safetensors") from error


def _check_members(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        if size > _LARGEST_NPZ:
            raise ValueError(f"its arrays have {size} bytes, an npz file may have {_LARGEST_NPZ}; use safetensors")
        for member in members:
            with archive.open(member) as content:
                _check_member(content, member)


def _check_member(content: IO[bytes], member: zipfile.ZipInfo) -> None:
    try:
        check_claim(content, member.file_size)
    except BROKEN as error:
        raise ValueError(f"{member.filename}: {error}") from error
