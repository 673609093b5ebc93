"""The source's samples: the same on every rank, from one seed."""

from __future__ import annotations

import hashlib
from math import pi

import torch

from service.jobs.files import DataLayout
from service.models.data import Dataset, Split
from trivet_example.declared import RingsData


def load(spec: RingsData, layout: DataLayout | None) -> Dataset:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(spec.rings, (spec.samples,), generator=generator)
    angles = 2 * pi * torch.rand(spec.samples, generator=generator)
    radii = 1 + labels + 0.1 * torch.randn(spec.samples, generator=generator)
    points = torch.stack((radii * angles.cos(), radii * angles.sin()), dim=1)
    digest = hashlib.sha256(points.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    cut = spec.samples - spec.held_out
    return Dataset(Split(points[:cut], labels[:cut]), Split(points[cut:], labels[cut:]), digest)
