"""Computes a transformer from embedded tokens, of which it is a function of real numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from service.models.transformer import Transformer
from service.parallel.collectives import gather_from_group


class AfterEmbedding(nn.Module):
    """``(batch, sequence, dim)`` embedded tokens → ``(batch, vocabulary)`` logits of the token after the last.

    Both are replicated over ``tp``. Instances may also come flattened. The stream between layers is divided by tokens
    where their number ``sequence`` divides by tp. Of a pipeline stage, its part of that: all but the first take the
    stream, and all but the last give it.
    """

    def __init__(self, model: Transformer, sequence: int) -> None:
        super().__init__()
        self.is_first = model.embedding is not None
        self.blocks, self.norm, self.head = model.blocks, model.norm, model.head
        self.sequence, self.dim, self.vocabulary = sequence, model.config.dim, model.config.vocab_size
        self.axis = model.output_axis
        divides = self.axis.size > 1 and sequence % self.axis.size == 0
        self.stream = model.sharded if divides else model.replicated

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.stream.divide(torch.unflatten(x, 1, (self.sequence, self.dim)) if x.dim() == 2 else x)
        for block in self.blocks.values():
            x = block(x, self.stream)
        if self.norm is None or self.head is None:
            return x
        logits = self.head.with_padding(self.stream.enter(self.norm(x, self.stream)))[:, -1]
        whole = gather_from_group(logits, -1, self.axis.group, self.axis.size)
        return whole[:, : self.vocabulary] if self.axis.is_padded else whole


@torch.no_grad()
def embedded(model: Transformer, tokens: Tensor) -> Tensor:
    """Return ``(batch, sequence)`` int64 → ``(batch, sequence, dim)``, replicated; all ranks of the group call it."""
    if model.embedding is None:
        raise ValueError("this pipeline stage has no embedding")
    found: Tensor = model.replicated.leave(model.embedding(tokens))
    return found
