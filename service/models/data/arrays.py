"""Labelled samples in named arrays of untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.formats.arrays import (
    BROKEN,
    INPUTS,
    TARGETS,
    ArrayHeader,
    count_samples,
    held_out,
    is_npz,
    npz_headers,
)
from service.jobs.spec.data import FileArrays
from service.models.data.sources import OnDisk, Split


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
    return _read_npz(path, field) if is_npz(path) else _map_safetensors(path, field)


def samples(arrays: Mapping[str, Tensor], spec: FileArrays, prefix: str, field: str) -> ArraySamples:
    """Return one split; ``ValueError`` if its arrays do not agree with the spec or with each other."""
    count_samples({name: _header_of(array) for name, array in arrays.items()}, spec, prefix, field)
    labels = arrays[prefix + TARGETS].long()
    if int(labels.min()) < 0 or int(labels.max()) >= spec.classes:
        got = f"{int(labels.min())} to {int(labels.max())}"
        what = f"{field}: {prefix + TARGETS}"
        raise ValueError(f"{what} are {got}; data.classes={spec.classes} allows 0 to {spec.classes - 1}")
    return ArraySamples(arrays[prefix + INPUTS], labels, spec)


def _header_of(array: Tensor) -> ArrayHeader:
    exact = not (array.is_floating_point() or array.is_complex())
    real = not (array.is_complex() or array.dtype == torch.bool)
    return ArrayHeader(tuple(array.shape), str(array.dtype), real=real, whole=exact)


def divide(whole: ArraySamples) -> tuple[ArraySamples, ArraySamples]:
    """Divide into training and test split, which is the end."""
    rest = len(whole) - held_out(len(whole), whole.spec.test_fraction, f"data.file holds {len(whole)} samples")
    return (
        replace(whole, inputs=whole.inputs[:rest], labels=whole.labels[:rest]),
        replace(whole, inputs=whole.inputs[rest:], labels=whole.labels[rest:]),
    )


def _map_safetensors(path: Path, field: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{field} is neither safetensors nor npz: {error}") from error


def _read_npz(path: Path, field: str) -> dict[str, Tensor]:
    try:
        npz_headers(path)  # before memory is taken for what they claim
        with np.load(path, allow_pickle=False) as arrays:
            return {
                name: torch.from_numpy(np.ascontiguousarray(arrays[name], dtype=arrays[name].dtype.newbyteorder("=")))
                for name in arrays.files
            }
    except BROKEN as error:
        raise ValueError(f"{field} is no npz file of numbers: {error}") from error
    except MemoryError as error:
        raise ValueError(f"{field} holds arrays too large for this machine's memory; use safetensors") from error
