"""What a transformer computes from embedded tokens: a function of real numbers, which token ids do not give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from service.models.transformer import Transformer
from service.parallel.collectives import gather_from_group


class AfterEmbedding(nn.Module):
    """``(batch, sequence, dim)`` embedded tokens → ``(batch, vocabulary)`` logits of the token after the last.

    Both are replicated over ``tp``. Instances may also come flattened. The stream between layers is divided by tokens
    where their number divides by tp.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        if model.norm is None or model.head is None:
            raise ValueError("a pipeline stage has not all layers from the embedding to the logits")
        self.blocks, self.norm, self.head = model.blocks, model.norm, model.head
        self.dim, self.vocabulary = model.config.dim, model.config.vocab_size
        self.axis, self.sharded, self.replicated = model.output_axis, model.sharded, model.replicated

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = torch.unflatten(x, 1, (-1, self.dim))
        divides = self.axis.size > 1 and x.shape[1] % self.axis.size == 0
        stream = self.sharded if divides else self.replicated
        x = stream.divide(x)
        for block in self.blocks.values():
            x = block(x, stream)
        logits = self.head(stream.enter(self.norm(x, stream)))[:, -1]
        return gather_from_group(logits, -1, self.axis.group, self.axis.size)


@torch.no_grad()
def embedded(model: Transformer, tokens: Tensor) -> Tensor:
    """``(batch, sequence)`` int64 → ``(batch, sequence, dim)``, replicated; all ranks of the group call it."""
    if model.embedding is None:
        raise ValueError("this pipeline stage has no embedding")
    found: Tensor = model.replicated.leave(model.embedding(tokens))
    return found
