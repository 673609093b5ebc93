"""Batches of the real kind: samples of the job's data set, or random ones that fit the model."""

from __future__ import annotations

import torch
from torch import Tensor

from service.compilation.program import Batch
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import data
from service.models.data import Split


def batches(
    spec: CompileSpec, config: MlpConfig | TransformerConfig, device: torch.device, part: int = 0
) -> tuple[Batch, ...]:
    """One batch for each step, with the sizes of ``spec.shapes`` in turn.

    ``part`` is the data-parallel rank: each sees samples of its own. Raises ``ValueError`` when the data set does
    not fit the model.
    """
    count = max(spec.steps, len(spec.shapes))
    sizes = [spec.shapes[index % len(spec.shapes)] for index in range(count)]
    samples = _samples(spec, config, sum(sizes), part)
    pieces = zip(torch.split(samples.inputs, sizes), torch.split(samples.targets, sizes), strict=True)
    return tuple(Batch((inputs.to(device),), targets.to(device)) for inputs, targets in pieces)


def _samples(spec: CompileSpec, config: MlpConfig | TransformerConfig, count: int, part: int) -> Split:
    if spec.data is None:
        return random_samples(config, count, spec.seed + part)
    split = data.load(spec.data).train
    check_fit(split, config)
    indices = torch.arange(part * count, (part + 1) * count) % len(split)
    return split.take(indices)


def random_samples(config: MlpConfig | TransformerConfig, count: int, seed: int) -> Split:
    """Standard normal features with random classes, or random tokens over the longest sequence."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    if isinstance(config, MlpConfig):
        inputs = torch.randn(count, config.in_features, generator=generator)
        return Split(inputs, integers(config.out_features, count))
    tokens = integers(config.vocab_size, count, config.max_sequence + 1)
    return Split(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def check_fit(split: Split, config: MlpConfig | TransformerConfig) -> None:
    """Raise ``ValueError`` naming the field unless the samples are what the model takes."""
    if isinstance(config, MlpConfig):
        _check_features(split, config)
    else:
        _check_tokens(split, config)


def _check_features(split: Split, config: MlpConfig) -> None:
    if not split.inputs.is_floating_point():
        raise ValueError("data: an mlp takes features; expected the source digits or synthetic, got tokens")
    features, classes = split.inputs.shape[1], int(split.targets.max()) + 1
    if features != config.in_features:
        raise ValueError(f"model.in_features={config.in_features}, but the data has {features} features")
    if classes > config.out_features:
        raise ValueError(f"model.out_features={config.out_features}, but the data has {classes} classes")


def _check_tokens(split: Split, config: TransformerConfig) -> None:
    if split.inputs.is_floating_point():
        raise ValueError("data: a transformer takes tokens; expected the source tokens, got features")
    if split.inputs.shape[1] > config.max_sequence:
        raise ValueError(
            f"data.sequence={split.inputs.shape[1]} is longer than model.max_sequence={config.max_sequence}"
        )
    if int(split.inputs.max()) >= config.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.vocab_size}, but the data has tokens up to {int(split.inputs.max())}"
        )
