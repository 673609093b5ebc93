"""Built-in data sets as tensors, and the order in which a training run visits them.

Everything is a pure function of the spec and the seed, so that every layout and every resumed run sees the
same samples at the same step. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from service.jobs.spec.data import DataSpec, DigitsData, SyntheticData, TokensData

SYNTHETIC_SEED = 20_260_921


@dataclass(frozen=True)
class Split:
    """Samples along dimension 0 of both tensors.

    Classes: inputs ``(n, features)`` float32, targets ``(n,)`` int64.
    Tokens: inputs and targets ``(n, sequence)`` int64; a target is the token after its input.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def take(self, indices: Tensor) -> Split:
        return Split(self.inputs[indices], self.targets[indices])

    def to(self, device: torch.device) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Dataset:
    """``sha256`` names the content: two runs with the same digest saw the same samples."""

    train: Split
    test: Split
    sha256: str

    def to(self, device: torch.device) -> Dataset:
        return Dataset(self.train.to(device), self.test.to(device), self.sha256)


def load(spec: DataSpec) -> Dataset:
    """The data set that ``spec`` names, on the CPU; the test split is the tail of the set."""
    return _LOADERS[type(spec)](spec)


def _load_digits(spec: DataSpec) -> Dataset:
    from sklearn.datasets import load_digits  # noqa: PLC0415 - slow to import, and only this source needs it

    digits = load_digits()
    inputs = torch.from_numpy(digits.data).float() / 16
    return _divide(Split(inputs, torch.from_numpy(digits.target).long()), held_out=5)


def _load_tokens(spec: DataSpec) -> Dataset:
    if not isinstance(spec, TokensData):
        raise TypeError(f"expected tokens data, got {type(spec).__name__}")
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


def _load_synthetic(spec: DataSpec) -> Dataset:
    """Standard normal points labelled by a random two-layer teacher; the same for every job."""
    if not isinstance(spec, SyntheticData):
        raise TypeError(f"expected synthetic data, got {type(spec).__name__}")
    generator = torch.Generator().manual_seed(SYNTHETIC_SEED)
    inputs = torch.randn(spec.samples, spec.features, generator=generator)
    hidden = torch.randn(spec.features, 32, generator=generator) / spec.features**0.5
    readout = torch.randn(32, spec.classes, generator=generator)
    targets = ((inputs @ hidden).tanh() @ readout).argmax(dim=1)
    return _divide(Split(inputs, targets), held_out=5)


_LOADERS = {DigitsData: _load_digits, TokensData: _load_tokens, SyntheticData: _load_synthetic}


@lru_cache(maxsize=1)
def python_reference() -> bytes:
    """The text behind ``help()``: Python's language reference, topics in alphabetical order (it varies by version)."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte of text that only this source needs
    except ImportError as error:
        raise RuntimeError(
            "data.source 'tokens' reads the standard library's 'pydoc_data', which this Python lacks"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _divide(samples: Split, held_out: int) -> Dataset:
    """Keep the last ``1/held_out`` of the samples for testing."""
    cut = len(samples) - len(samples) // held_out
    digest = hashlib.sha256(samples.inputs.numpy().tobytes() + samples.targets.numpy().tobytes()).hexdigest()
    return Dataset(
        train=Split(samples.inputs[:cut], samples.targets[:cut]),
        test=Split(samples.inputs[cut:], samples.targets[cut:]),
        sha256=digest,
    )


@dataclass(frozen=True)
class BatchOrder:
    """Which samples make up the batch of a step: a pure function, the same for every layout.

    The batches cut one endless row of sample indices into pieces of ``global_batch``; each epoch of
    ``samples`` entries in that row is a permutation drawn from ``(seed, epoch)``. A batch may straddle epochs.
    """

    seed: int
    samples: int
    global_batch: int

    def __post_init__(self) -> None:
        if self.samples < 1 or self.global_batch < 1:
            raise ValueError(f"samples={self.samples} and global_batch={self.global_batch} must be at least 1")

    def indices(self, step: int) -> Tensor:
        """Sample indices of the ``step``-th batch (from 0), int64 ``(global_batch,)``."""
        position, end = step * self.global_batch, (step + 1) * self.global_batch
        pieces: list[Tensor] = []
        while position < end:
            epoch, offset = divmod(position, self.samples)
            piece = _permutation(self.seed, epoch, self.samples)[offset : offset + end - position]
            pieces.append(piece)
            position += len(piece)
        return torch.cat(pieces)

    def share(self, step: int, rank: int, ranks: int) -> Tensor:
        """The part of the batch that data-parallel ``rank`` of ``ranks`` computes."""
        if self.global_batch % ranks:
            raise ValueError(f"global_batch={self.global_batch} does not divide over {ranks} data-parallel ranks")
        size = self.global_batch // ranks
        return self.indices(step)[rank * size : (rank + 1) * size]


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, samples: int) -> Tensor:
    """Seeded by a hash, so that neighbouring seeds and epochs share nothing."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(samples, generator=generator)
