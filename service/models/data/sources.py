"""Loads the data that a spec names, as samples in memory or on disk, some of which are held out as the test split.

The table of sources is ``service.jobs.spec.data.SOURCES``. Those that need no file are here: points labelled by a
random teacher, scikit-learn's handwritten digits, and a text that comes with Python, as bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from service.jobs.files import DataLayout
from service.jobs.spec.data import DigitsData, SyntheticData, TokensData


@dataclass(frozen=True)
class Split:
    """Samples in memory, along dimension 0 of both tensors.

    Classes: inputs ``(n, features)`` float32, targets ``(n,)`` int64.
    Tokens: inputs and targets ``(n, sequence)`` int64; a target is the token after its input.
    A target of ``service.jobs.plugins.IGNORED`` does not count. Labels may be of any type of whole numbers: those that
    are taken are int64.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def sequence(self) -> int | None:
        return self.targets.shape[1] if self.targets.dim() == 2 else None

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def take(self, indices: Tensor) -> Split:
        indices = indices.to(self.device, non_blocking=True)
        return Split(self.inputs[indices], self.targets[indices]).with_int64_labels()

    def with_int64_labels(self) -> Split:
        """Return the samples with labels that losses take, and that can be compared with ``IGNORED``: in uint8, -100 is
        156.
        """
        is_whole = not self.targets.is_floating_point() and self.targets.dtype is not torch.bool
        return Split(self.inputs, self.targets.long()) if is_whole else self

    def to(self, device: torch.device) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))


class Samples(Protocol):
    """Samples that may be more than memory holds."""

    def __len__(self) -> int: ...

    @property
    def sequence(self) -> int | None:
        """Return the number of tokens in a sample; ``None`` if samples have class labels."""

    @property
    def device(self) -> torch.device:
        """Return the device of the samples that :meth:`take` returns."""

    def take(self, indices: Tensor) -> Split:
        """Return the samples at these indices (int64, on any device), in their order."""

    def to(self, device: torch.device) -> Samples:
        """Return the same samples, on ``device`` if they are kept in memory."""


class OnDisk:
    """Samples that stay on disk; a batch is read when it is taken."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def to(self, device: torch.device) -> Self:
        """Return the samples unchanged."""
        return self


@dataclass(frozen=True)
class Dataset:
    """``sha256`` names the content: two runs with the same digest saw the same samples."""

    train: Samples
    test: Samples
    sha256: str

    def to(self, device: torch.device) -> Dataset:
        return Dataset(self.train.to(device), self.test.to(device), self.sha256)


def _divide(samples: Split, held_out: int) -> Dataset:
    """Keep the last ``1/held_out`` of the samples for testing."""
    cut = len(samples) - len(samples) // held_out
    digest = hashlib.sha256(samples.inputs.numpy().tobytes() + samples.targets.numpy().tobytes()).hexdigest()
    return Dataset(
        train=Split(samples.inputs[:cut], samples.targets[:cut]),
        test=Split(samples.inputs[cut:], samples.targets[cut:]),
        sha256=digest,
    )


_SYNTHETIC_SEED = 20_260_921


def load_synthetic(spec: SyntheticData, layout: DataLayout | None) -> Dataset:
    """Return standard normal points labelled by a random two-layer teacher; the same for every job."""
    generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
    inputs = torch.randn(spec.samples, spec.features, generator=generator)
    hidden = torch.randn(spec.features, 32, generator=generator) / spec.features**0.5
    readout = torch.randn(32, spec.classes, generator=generator)
    targets = ((inputs @ hidden).tanh() @ readout).argmax(dim=1)
    return _divide(Split(inputs, targets), held_out=5)


def load_digits(spec: DigitsData, layout: DataLayout | None) -> Dataset:
    """Return pixels in [0, 1] and their classes; the last fifth is the test split."""
    rows = np.loadtxt(_installed_file(), delimiter=",")
    inputs = torch.from_numpy(rows[:, :-1]).float() / 16
    return _divide(Split(inputs, torch.from_numpy(rows[:, -1]).long()), held_out=5)


def _installed_file() -> Path:
    """Return the file that ``sklearn.datasets.load_digits`` reads: importing that takes a second, in every rank."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("scikit-learn, which brings the digits, is not installed")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def load_tokens(spec: TokensData, layout: DataLayout | None) -> Dataset:
    """Return the corpus cut into sequences, the last tenth for tests. ``ValueError`` if they are too long for ten."""
    text = torch.frombuffer(bytearray(python_reference()), dtype=torch.uint8).long()
    samples = (len(text) - 1) // spec.sequence
    if samples < 10:
        raise ValueError(
            f"data.sequence={spec.sequence} cuts the corpus of {len(text)} bytes into {samples} samples; "
            f"at most {(len(text) - 1) // 10} leaves ten"
        )
    used = samples * spec.sequence
    inputs, targets = text[:used], text[1 : used + 1]
    return _divide(Split(inputs.view(samples, -1), targets.reshape(samples, -1)), held_out=10)


@lru_cache(maxsize=1)
def python_reference() -> bytes:
    """Return the text behind ``help()``: Python's language reference by topic, which varies by version."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte of text that only this source needs
    except ImportError as error:
        raise RuntimeError(
            "data.source 'tokens' reads the standard library's 'pydoc_data', which this Python lacks"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


Loader = Callable[[Any, DataLayout | None], Dataset]
"""Maps the source's own spec and the folder with uploaded files (``None``: there are none) to its samples, on the CPU
or on disk. Every rank calls it, and gets the same samples; what can't be read raises ``ValueError`` with the field.
"""
