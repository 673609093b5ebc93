"""Models of Trivet's own: what a job trained, or a configuration with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from service.bounds.graph import UnsupportedModelError
from service.bounds.memory import MemoryShortageError
from service.jobs.layout import DataLayout
from service.jobs.plugins import Features
from service.jobs.spec.verify import FromOnnx, InstancesProperty, RobustnessProperty
from service.models import build, load_into
from service.models.embedded import AfterEmbedding, embedded
from service.models.reference import resolve
from service.models.transformer import Transformer
from service.verification.load.task_loader import TaskLoader
from service.verification.properties import Property, read
from service.verification.properties.robustness import RobustSamples
from service.verification.properties.tokens import robust_tokens
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

    asked = robust_tokens(property_spec, model.config, embed, data)
    return asked, AfterEmbedding(model, asked.samples.inputs.shape[1] // model.config.dim)
