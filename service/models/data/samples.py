"""Samples, in memory or on disk, and the test split that is held out of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Samples in memory, along dimension 0 of both tensors.

    Classes: inputs ``(n, features)`` float32, targets ``(n,)`` int64.
    Tokens: inputs and targets ``(n, sequence)`` int64; a target is the token after its input.
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
        return Split(self.inputs[indices], self.targets[indices])

    def to(self, device: torch.device) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))


class Samples(Protocol):
    """Samples that may be more than memory holds."""

    def __len__(self) -> int: ...

    @property
    def sequence(self) -> int | None:
        """Tokens in a sample; ``None`` where samples have class labels."""

    @property
    def device(self) -> torch.device:
        """Return the device of the samples that :meth:`take` returns."""

    def take(self, indices: Tensor) -> Split:
        """Return the samples at these indices (int64, on any device), in their order."""

    def to(self, device: torch.device) -> Samples:
        """Return the same samples, on ``device`` if they are kept in memory."""


@dataclass(frozen=True)
class Dataset:
    """``sha256`` names the content: two runs with the same digest saw the same samples."""

    train: Samples
    test: Samples
    sha256: str

    def to(self, device: torch.device) -> Dataset:
        return Dataset(self.train.to(device), self.test.to(device), self.sha256)


def divide(samples: Split, held_out: int) -> Dataset:
    """Keep the last ``1/held_out`` of the samples for testing."""
    cut = len(samples) - len(samples) // held_out
    digest = hashlib.sha256(samples.inputs.numpy().tobytes() + samples.targets.numpy().tobytes()).hexdigest()
    return Dataset(
        train=Split(samples.inputs[:cut], samples.targets[:cut]),
        test=Split(samples.inputs[cut:], samples.targets[cut:]),
        sha256=digest,
    )
