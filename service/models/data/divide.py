"""Holding out the test split of a set in memory."""

from __future__ import annotations

import hashlib

from service.models.data.samples import Dataset, Split


def divide(samples: Split, held_out: int) -> Dataset:
    """Keep the last ``1/held_out`` of the samples for testing."""
    cut = len(samples) - len(samples) // held_out
    digest = hashlib.sha256(samples.inputs.numpy().tobytes() + samples.targets.numpy().tobytes()).hexdigest()
    return Dataset(
        train=Split(samples.inputs[:cut], samples.targets[:cut]),
        test=Split(samples.inputs[cut:], samples.targets[cut:]),
        sha256=digest,
    )
