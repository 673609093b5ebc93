"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

RMSNorm: Zhang & Sennrich, 2019. Rotary positions: Su et al., 2021. Grouped queries: Ainslie et al., 2023.
SwiGLU: Shazeer, 2020. Heads, feed-forward width and vocabulary are divided over tensor-parallel ranks, and the residual
stream by tokens (sequence parallelism). A vocabulary that does not divide is padded.

Of embedded tokens it is a function of real numbers, which :class:`AfterEmbedding` computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import pi, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from service.jobs.spec.families.transformer import RopeScaling
from service.jobs.spec.model import TransformerConfig
from service.models.initialize import Constant, Distribution, Normal
from service.parallel.collectives import gather_from_group
from service.parallel.mesh import SINGLE, Axis, padded
from service.parallel.tensor import (
    ColumnParallelLinear,
    Replicated,
    ResidualStream,
    RowParallelLinear,
    SequenceSharded,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    WholeLinear,
    joint,
    local,
)
from service.parallel.tensor.placement import is_exporting


class Rotary(nn.Module):
    """Rotates the two halves of each head by angles that grow with the position (Su et al., 2021), in tensors ``(batch,
    heads, seq, head_dim)``.

    The tables are float32 buffers that no precision policy casts and no state dict holds; blocks share one instance.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        # Real on the CPU even if parameters are only planned on the meta device: buffers are not filled later.
        with torch.device("cpu"):
            angles = torch.outer(torch.arange(positions, dtype=torch.float64), _frequencies(head_dim, theta, scaling))
            self.register_buffer("cos", angles.cos().float(), persistent=False)
            self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per position of each pair, float64 ``(head_dim / 2,)``.

    Scaling (Llama 3.1) divides those by ``factor`` that turn less than ``low_freq_factor`` times over the original
    sequence, leaves those that turn more than ``high_freq_factor`` times, and goes linearly from one to the other.
    """
    own = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return own
    turns = scaling.original_sequence * own / (2 * pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return own * (kept + (1 - kept) / scaling.factor)


_WEIGHT_STD = 0.02
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels of attention on CUDA, in the order in which they are tried."""


class RMSNorm(nn.Module):
    """``x / rms(x) · weight`` over the last dimension, in float32 at least."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        weight = stream.shared(local(self.weight))
        if not (torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()):
            return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * weight).to(x.dtype)


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention in plain operators; groups of query heads share heads of ``key`` and ``value``."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-2, -1) / sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention ``(batch, heads, seq, head_dim)``: fused when it runs, explicit when a graph is
    exported.

    An exported graph must show matrix products and a softmax, not a backend's kernel; the values are the same.
    """
    if is_exporting() or torch.onnx.is_in_onnx_export():
        return _explicit_attention(query, key, value)
    grouped = query.shape[1] != key.shape[1]
    if not query.is_cuda:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query self-attention with whole heads on a rank.

    Heads of keys and values that do not divide over the ranks are whole on each, which takes those that its queries
    attend to.
    """

    def __init__(self, config: TransformerConfig, rotary: Rotary, axis: Axis) -> None:
        super().__init__()
        self.head_dim, self.rotary = config.head_features, rotary
        wide, narrow = config.heads * self.head_dim, config.key_value_heads * self.head_dim
        self.query = ColumnParallelLinear(config.dim, wide, axis, bias=config.qkv_bias, copied_input=True)
        self.groups, self.axis = config.heads // config.key_value_heads, axis
        self.key: nn.Module
        self.value: nn.Module
        if config.key_value_heads % axis.size:
            self.key = WholeLinear(config.dim, narrow, axis, bias=config.qkv_bias)
            self.value = WholeLinear(config.dim, narrow, axis, bias=config.qkv_bias)
        else:
            self.key = ColumnParallelLinear(config.dim, narrow, axis, bias=config.qkv_bias, copied_input=True)
            self.value = ColumnParallelLinear(config.dim, narrow, axis, bias=config.qkv_bias, copied_input=True)
        self.output = RowParallelLinear(wide, config.dim, axis, bias=False, partial_output=True)

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        x = stream.enter(x)
        query, key, value = self._projected(x)
        attended = _attend(self.rotary(query), self.rotary(key), value)
        return stream.leave(self.output(attended.transpose(1, 2).flatten(-2)))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of queries, and as many of keys and values, or a divisor of that number."""
        key, value = self.key, self.value
        if isinstance(key, ColumnParallelLinear) and isinstance(value, ColumnParallelLinear):
            query, keys, values = map(self._heads, joint((self.query, key, value), x))
            return query, keys, values
        query = self._heads(self.query(x))
        keys, values = (self._of_queries(self._heads(layer(x)), query.shape[1]) for layer in (key, value))
        return query, keys, values

    def _of_queries(self, x: Tensor, heads: int) -> Tensor:
        """Return the heads of keys or values that this rank's heads of queries attend to, one for each."""
        return x.repeat_interleave(self.groups, dim=1).narrow(1, self.axis.rank * heads, heads)

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (-1, self.head_dim)).transpose(1, 2)


class _FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) · up(x))``."""

    def __init__(self, config: TransformerConfig, axis: Axis) -> None:
        super().__init__()
        width = config.feed_forward_dim
        self.gate = ColumnParallelLinear(config.dim, width, axis, bias=False, copied_input=True)
        self.up = ColumnParallelLinear(config.dim, width, axis, bias=False, copied_input=True)
        self.down = RowParallelLinear(width, config.dim, axis, bias=False, partial_output=True)

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        x = stream.enter(x)
        return stream.leave(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream ``(batch, seq, dim)``."""

    def __init__(self, config: TransformerConfig, rotary: Rotary, axis: Axis) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rotary, axis)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = _FeedForward(config, axis)

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        x = x + self.attention(self.attention_norm(x, stream), stream)
        return x + self.feed_forward(self.feed_forward_norm(x, stream), stream)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """``(batch, seq)`` int64 tokens → ``(batch, seq, vocab_size / tp)`` logits, divided along ``output_axis``: where
    they do not divide, the last ranks have fewer.

    Between blocks, and between the stages of a pipeline, each tensor-parallel rank has a part of the tokens. A
    model in one piece also takes sequences that do not divide by tp; its ranks then have all tokens each.
    """

    before_blocks: tuple[str, ...] = ("embedding",)
    after_blocks: tuple[str, ...] = ("norm", "head")
    blocks_alike = True
    is_static = True

    def __init__(self, config: TransformerConfig, axis: Axis = SINGLE) -> None:
        super().__init__()
        self.config, self.output_axis = config, padded(axis, config.vocab_size)
        self.replicated, self.sharded = Replicated(axis), SequenceSharded(axis)
        rotary = Rotary(config.head_features, config.max_sequence, config.rope_theta, config.rope_scaling)
        self.embedding: nn.Module | None = VocabularyParallelEmbedding(
            config.vocab_size, config.dim, axis, partial_output=True
        )
        self.blocks = nn.ModuleDict({str(index): Block(config, rotary, axis) for index in range(config.layers)})
        self.norm: nn.Module | None = RMSNorm(config.dim, config.norm_eps)
        self.head: VocabularyParallelHead | None = VocabularyParallelHead(config.dim, config.vocab_size, axis)

    @property
    def tied(self) -> Mapping[str, str]:
        """Return the head's weight as a second place of the embedding's, if the configuration ties them."""
        return {"head.weight": "embedding.weight"} if self.config.tied_embeddings else {}

    def forward(self, x: Tensor) -> Tensor:
        stream = self._stream(x)
        if self.embedding is not None:
            x = stream.leave(self._embedded(self.embedding, x))
        for block in self.blocks.values():
            x = block(x, stream)
        return x if self.norm is None or self.head is None else self.head(stream.enter(self.norm(x, stream)))

    def _embedded(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = embedding(tokens)
        if self.config.padding_token is None:
            return found
        return torch.where((tokens == self.config.padding_token).unsqueeze(-1), found.detach(), found)

    def _stream(self, x: Tensor) -> ResidualStream:
        tp = self.output_axis.size
        if self.embedding is None:
            return self.sharded if tp > 1 else self.replicated
        sequence = x.shape[1]
        if sequence > self.config.max_sequence:
            raise ValueError(f"a sequence of {sequence} exceeds max_sequence={self.config.max_sequence}")
        if tp > 1 and sequence % tp == 0:
            return self.sharded
        if tp > 1 and self.head is None:
            raise ValueError(f"a pipeline sends parts of a sequence: {sequence} does not divide by tp={tp}")
        return self.replicated

    def distribution(self, name: str) -> Distribution:
        """Draw normal weights; those that write to the residual stream are scaled by 1/√(2·layers) (GPT-2)."""
        if "norm" in name:
            return Constant(1.0)
        if name.endswith(".bias"):
            return Constant(0.0)
        into_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        return Normal(_WEIGHT_STD / sqrt(2 * self.config.layers) if into_residual else _WEIGHT_STD)


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
