"""Batches of the real kind: samples of the job's data set, or random ones that fit the model."""

from __future__ import annotations

import torch
from torch import Tensor

from service.compilation.program.model import SampleBatch
from service.jobs.layout import DataLayout
from service.jobs.plugins import Features, Tokens
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import ModelConfig
from service.models import data
from service.models.data import Split


def batches(
    spec: CompileSpec,
    config: ModelConfig,
    device: torch.device,
    part: int = 0,
    layout: DataLayout | None = None,
) -> tuple[SampleBatch, ...]:
    """Return one batch for each step: ``spec.forwards`` forwards with the sizes of ``spec.shapes`` in turn.

    ``part`` is the data-parallel rank: each sees samples of its own. ``layout`` has uploaded files. Raises
    ``ValueError`` when the data set does not fit the model.
    """
    count = max(spec.steps, len(spec.shapes))
    sizes = [spec.shapes[index % len(spec.shapes)] * spec.forwards for index in range(count)]
    samples = _samples(spec, config, sum(sizes), part, layout)
    pieces = zip(torch.split(samples.inputs, sizes), torch.split(samples.targets, sizes), strict=True)
    return tuple(SampleBatch((inputs.to(device),), targets.to(device)) for inputs, targets in pieces)


def _samples(spec: CompileSpec, config: ModelConfig, count: int, part: int, layout: DataLayout | None) -> Split:
    if spec.data is None:
        return _random_samples(config, count, spec.seed + part)
    samples = data.load(spec.data, layout).train
    taken = samples.take(torch.arange(part * count, (part + 1) * count) % len(samples))
    _check_fit(taken, config)
    return taken


def _random_samples(config: ModelConfig, count: int, seed: int) -> Split:
    """Return standard normal features with random classes, or random tokens over the longest sequence."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    reads = config.reads
    if isinstance(reads, Features):
        inputs = torch.randn(count, reads.features, generator=generator)
        return Split(inputs, integers(reads.classes, count))
    tokens = integers(reads.vocabulary, count, reads.sequence + 1)
    return Split(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _check_fit(split: Split, config: ModelConfig) -> None:
    """Raise ``ValueError`` naming the field unless the samples are what the model takes."""
    reads = config.reads
    if isinstance(reads, Features):
        _check_features(split, config.family, reads)
    else:
        _check_tokens(split, config.family, reads)


def _check_features(split: Split, family: str, reads: Features) -> None:
    if not split.inputs.is_floating_point():
        raise ValueError(f"data: a model of family {family} reads features; expected a source of them, got tokens")
    features, classes = split.inputs.shape[1], int(split.targets.max()) + 1
    if features != reads.features:
        raise ValueError(_misfit(reads.features_field, "features", reads.features, f"{features} features"))
    if classes > reads.classes:
        raise ValueError(_misfit(reads.classes_field, "classes", reads.classes, f"{classes} classes"))


def _check_tokens(split: Split, family: str, reads: Tokens) -> None:
    if split.inputs.is_floating_point():
        raise ValueError(f"data: a model of family {family} reads tokens; expected a source of them, got features")
    sequence, highest = split.inputs.shape[1], int(split.inputs.max())
    if sequence > reads.sequence:
        longest = reads.sequence_field or "the longest sequence"
        raise ValueError(f"data.sequence={sequence} is longer than model.{longest}={reads.sequence}")
    if highest >= reads.vocabulary:
        raise ValueError(_misfit(reads.vocabulary_field, "vocabulary", reads.vocabulary, f"tokens up to {highest}"))


def _misfit(field: str | None, name: str, built: int, given: str) -> str:
    return f"model.{field or name}={built}, but the data has {given}"
