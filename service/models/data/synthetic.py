"""Points labelled by a random teacher."""

from __future__ import annotations

import torch

from service.jobs.layout import DataLayout
from service.jobs.spec.data import SyntheticData
from service.models.data.samples import Dataset, Split, divide

_SYNTHETIC_SEED = 20_260_921


def load(spec: SyntheticData, layout: DataLayout | None) -> Dataset:
    """Return standard normal points labelled by a random two-layer teacher; the same for every job."""
    generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
    inputs = torch.randn(spec.samples, spec.features, generator=generator)
    hidden = torch.randn(spec.features, 32, generator=generator) / spec.features**0.5
    readout = torch.randn(32, spec.classes, generator=generator)
    targets = ((inputs @ hidden).tanh() @ readout).argmax(dim=1)
    return divide(Split(inputs, targets), held_out=5)
