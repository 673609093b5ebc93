"""scikit-learn's handwritten digits."""

from __future__ import annotations

import torch

from service.jobs.layout import DataLayout
from service.jobs.spec.data import DigitsData
from service.models.data.divide import divide
from service.models.data.samples import Dataset, Split


def load(spec: DigitsData, layout: DataLayout | None) -> Dataset:
    """Return pixels in [0, 1] and their classes; the last fifth is the test split."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - slow to import, and only this source needs it

    digits = load_digits()
    inputs = torch.from_numpy(digits.data).float() / 16
    return divide(Split(inputs, torch.from_numpy(digits.target).long()), held_out=5)
