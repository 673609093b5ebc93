"""Defines the decoder-only transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from service.jobs.plugins import ModelConfig, Strict, Tokens, disagreement


class RopeScaling(Strict):
    """Slows rotary frequencies for sequences longer than those on which a model was first trained (Llama 3.1)."""

    factor: float = Field(ge=1, description="factor by which low frequencies are slowed down")
    low_freq_factor: float = Field(
        1.0, gt=0, description="waves longer than original_sequence over this are slowed down in full"
    )
    high_freq_factor: float = Field(4.0, gt=0, description="waves shorter than original_sequence over this stay")
    original_sequence: int = Field(8192, ge=1, le=2**24, description="tokens that the model was first trained for")

    @model_validator(mode="after")
    def _low_below_high(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            got, other = self.low_freq_factor, self.high_freq_factor
            raise disagreement("low_freq_factor", "it is not the lower one", got, f"less than high_freq_factor={other}")
        return self


class TransformerConfig(ModelConfig):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Literal["transformer"] = Field("transformer", description="a decoder as in Llama")
    vocab_size: int = Field(256, ge=2, le=2**24, description="size of the vocabulary; any size divides over tp")
    dim: int = Field(64, ge=2, le=2**20, description="features of a token")
    layers: int = Field(2, ge=1, le=4096, description="blocks of attention and feed-forward")
    heads: int = Field(4, ge=1, le=4096, description="heads of the attention")
    kv_heads: int | None = Field(None, ge=1, le=4096, description="key/value heads; as many as heads when absent")
    head_dim: int | None = Field(None, ge=2, le=2**20, description="features of a head; dim/heads when absent")
    qkv_bias: bool = Field(False, description="biases of queries, keys and values, as Qwen2 has them")
    ffn_dim: int | None = Field(None, ge=1, le=2**24, description="SwiGLU width; 4·dim when absent")
    max_sequence: int = Field(128, ge=1, le=2**24, description="the most tokens of a sample")
    norm_eps: float = Field(1e-5, gt=0, description="the number that keeps the division of RMSNorm finite")
    rope_theta: float = Field(10_000.0, gt=0, description="the base of the rotary positions")
    rope_scaling: RopeScaling | None = Field(
        None, description="stretching of rotary positions to longer texts, as in Llama 3.1"
    )
    tied_embeddings: bool = Field(False, description="one table of vocab_size × dim for both embedding and head")
    padding_token: int | None = Field(
        None, ge=0, description="a token whose embedding does not learn, as pad_token_id of Hugging Face's libraries"
    )

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_features(self) -> int:
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def feed_forward_dim(self) -> int:
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def places(self) -> int:
        return self.layers

    @property
    def divided(self) -> Mapping[str, int]:
        return {"heads": self.heads, "ffn_dim": self.feed_forward_dim}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        biases = ("query.bias", "key.bias", "value.bias") if self.qkv_bias else ()
        attention = ("query.weight", "key.weight", "value.weight", *biases, "output.weight")
        block = (
            "attention_norm.weight",
            *(f"attention.{part}" for part in attention),
            "feed_forward_norm.weight",
            *(f"feed_forward.{part}.weight" for part in ("gate", "up", "down")),
        )
        blocks = (f"blocks.{index}.{part}" for index in range(self.layers) for part in block)
        return ("embedding.weight", *blocks, "norm.weight", *(() if self.tied_embeddings else ("head.weight",)))

    @property
    def reads(self) -> Tokens:
        return Tokens(self.vocab_size, self.max_sequence, "vocab_size", "max_sequence")

    def flop_per_sample(self, parameters: int, sequence: int) -> int:
        """Count ``6·(N − N_emb) + 12·L·H·d_head·sequence`` per token (PaLM, Chowdhery et al., 2022, appendix B).

        That counts attention as if it were not causal, as is customary. A tied table counts once, as the head's.
        """
        matrices = parameters - (0 if self.tied_embeddings else self.vocab_size * self.dim)
        return (6 * matrices + 12 * self.layers * self.heads * self.head_features * sequence) * sequence

    @model_validator(mode="after")
    def _heads_divide(self) -> TransformerConfig:
        if self.head_dim is None and self.dim % self.heads:
            message = f"dim={self.dim} does not divide into heads={self.heads}"
            raise disagreement("heads", message, self.heads, f"a divisor of {self.dim}")
        if self.head_dim is not None and self.head_dim % 2:
            raise disagreement("head_dim", "it is odd, which rotary positions cannot be", self.head_dim, "an even one")
        if self.head_features % 2:
            message = f"dim/heads = {self.dim // self.heads} is odd, which rotary positions cannot be"
            raise disagreement("heads", message, self.heads, "one that makes dim/heads even")
        if self.heads % self.key_value_heads:
            message = f"heads={self.heads} is not a multiple of kv_heads={self.key_value_heads}"
            raise disagreement("kv_heads", message, self.kv_heads, f"a divisor of {self.heads}")
        if self.padding_token is not None and self.padding_token >= self.vocab_size:
            message = f"vocab_size={self.vocab_size} has no such token"
            raise disagreement("padding_token", message, self.padding_token, f"at most {self.vocab_size - 1}")
        return self
