"""Loads models of Trivet's own, trained or with random weights, and their property on tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from service.bounds.graph import UnsupportedModelError
from service.bounds.memory import MemoryShortageError
from service.jobs.files import DataLayout
from service.jobs.plugins import Features, Tokens
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.verify import FromOnnx, InstancesProperty, RobustnessProperty
from service.models import build, load_into
from service.models.data import Split
from service.models.reference import resolve
from service.models.transformer import AfterEmbedding, Transformer, embedded
from service.verification.load.task_loader import TaskLoader
from service.verification.properties import Property, read
from service.verification.properties.base import PropertyError
from service.verification.properties.robustness import RobustSamples, first_samples
from service.verification.task import RefusedModel, Task


def load_trained(data: DataLayout, loader: TaskLoader) -> Task | RefusedModel:
    """Build the model that the spec refers to, with its weights, on the job's mesh, and read its property."""
    spec = loader.spec
    assert spec.model is not None
    assert not isinstance(spec.model, FromOnnx)
    assert not isinstance(spec.property, InstancesProperty)
    config, weights = resolve(spec.model, data)
    reads, property_spec = config.reads, spec.property

    def features_property() -> Property:
        if not isinstance(reads, Features):
            raise MemoryShortageError("the model embeds the property's tokens, and does not fit", "preparing the model")
        return read(property_spec, reads.features, reads.classes, data)

    def load() -> Task:
        module = build(config, loader.mesh, dtype=torch.float32, device=loader.device, seed=spec.seed)
        if weights is not None:
            load_into(module, weights)
        module.eval().requires_grad_(False)
        if isinstance(reads, Features):
            asked, shape = features_property(), (reads.features,)
        else:
            asked, module = _of_tokens(module, data, loader)
            shape = (asked.samples.inputs.shape[1],)
        return loader.task(module, loader.engine_of_module(loader.arithmetic.module_to_bound(module), shape), asked)

    return loader.unless_too_large(load, features_property)


def _of_tokens(module: nn.Module, data: DataLayout, loader: TaskLoader) -> tuple[RobustSamples, nn.Module]:
    """Return the property of embedded tokens, and the model after the embedding, which only the first stage has."""
    property_spec, line = loader.spec.property, loader.line
    if not isinstance(module, Transformer) or not isinstance(property_spec, RobustnessProperty):
        raise UnsupportedModelError(
            "a model of tokens takes ids, and its first operator, aten.embedding, has no rule: there is no box of "
            "inputs to certify; expected a model that reads features, or a transformer and robustness"
        )
    model, device = module, next(module.parameters()).device

    def embed(ids: Tensor) -> Tensor:
        return line.of_first(embedded(model, ids.to(device)) if line.is_first else None)

    asked = _robust_tokens(property_spec, model.config, embed, data)
    return asked, AfterEmbedding(model, asked.samples.inputs.shape[1] // model.config.dim)


def _robust_tokens(
    spec: RobustnessProperty,
    config: TransformerConfig,
    embed: Callable[[Tensor], Tensor],
    layout: DataLayout | None = None,
) -> RobustSamples:
    """Return the first ``count`` test sequences, embedded and flattened; the class is the token that follows.

    ``embed`` maps ids ``(batch, sequence)`` to ``(batch, sequence, dim)``; all ranks that share it call this.
    Raises :class:`PropertyError` if the data does not fit.
    """
    asked = spec.robustness
    gives = asked.data.gives
    if not isinstance(gives, Tokens):
        raise PropertyError(
            f"property.robustness.data.source {asked.data.source} has no tokens, which a {config.family} reads"
        )
    if gives.vocabulary > config.vocab_size or gives.sequence > config.max_sequence:
        raise PropertyError(
            f"property.robustness.data has sequences of {gives.sequence} out of {gives.vocabulary} tokens, "
            f"the model takes {config.max_sequence} out of {config.vocab_size}"
        )
    samples = first_samples(spec, layout)
    inputs = [embed(ids).flatten(1).cpu() for ids in torch.split(samples.inputs, AT_ONCE)]
    split = Split(torch.cat(inputs), samples.targets[:, -1])
    return RobustSamples(split, config.vocab_size, asked.eps, asked.norm, entries=asked.entries)


AT_ONCE = 1024
