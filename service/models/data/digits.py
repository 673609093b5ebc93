"""scikit-learn's handwritten digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from service.jobs.layout import DataLayout
from service.jobs.spec.data import DigitsData
from service.models.data.samples import Dataset, Split, divide


def load(spec: DigitsData, layout: DataLayout | None) -> Dataset:
    """Return pixels in [0, 1] and their classes; the last fifth is the test split."""
    rows = np.loadtxt(_installed_file(), delimiter=",")
    inputs = torch.from_numpy(rows[:, :-1]).float() / 16
    return divide(Split(inputs, torch.from_numpy(rows[:, -1]).long()), held_out=5)


def _installed_file() -> Path:
    """Return the file that ``sklearn.datasets.load_digits`` reads: importing that takes a second, in every rank."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("scikit-learn, which brings the digits, is not installed")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
