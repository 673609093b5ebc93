"""Robustness of a transformer's next token against changes of the tokens before it, in the space of embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from service.jobs.layout import DataLayout
from service.jobs.plugins import Tokens
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.verify import RobustnessProperty
from service.models.data import Split, load
from service.verification.properties.base import PropertyError
from service.verification.properties.robustness import RobustSamples


def robust_tokens(
    spec: RobustnessProperty,
    config: TransformerConfig,
    embed: Callable[[Tensor], Tensor],
    layout: DataLayout | None = None,
) -> RobustSamples:
    """Return the first ``count`` test sequences, embedded and flattened; the class is the token that follows.

    ``embed`` maps ids ``(batch, sequence)`` to ``(batch, sequence, dim)``; all ranks that share it call this.
    Raises :class:`PropertyError` where the data does not fit.
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
    test = load(asked.data, layout).test
    if asked.count > len(test):
        raise PropertyError(f"property.robustness.count={asked.count}, but the test split has {len(test)} samples")
    samples = test.take(torch.arange(asked.count))
    inputs = [embed(ids).flatten(1).cpu() for ids in torch.split(samples.inputs, AT_ONCE)]
    return RobustSamples(Split(torch.cat(inputs), samples.targets[:, -1]), config.vocab_size, asked.eps, asked.norm)


AT_ONCE = 1024
