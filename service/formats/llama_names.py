"""Parameter names of our transformer and of Llama-style files. Shapes, and the order of rotary halves, are the same."""

from __future__ import annotations

from collections.abc import Mapping

from service.jobs.spec.families import TransformerConfig

EMBEDDING, HEAD = "embedding.weight", "head.weight"
THEIR_EMBEDDING, THEIR_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {EMBEDDING: THEIR_EMBEDDING, "norm.weight": "model.norm.weight", HEAD: THEIR_HEAD}
_QKV = ("query", "key", "value")
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attention.{ours}.bias": f"self_attn.{theirs}_proj.bias" for ours, theirs in zip(_QKV, "qkv", strict=True)}
DERIVED = "rotary_emb.inv_freq"
"""What old checkpoints also hold: it follows from the configuration."""


def their_names(config: TransformerConfig) -> dict[str, str]:
    """Return their name of each of our parameters; a head that is tied to the embedding has none of its own."""
    in_block = _IN_BLOCK | (_BIASES if config.qkv_bias else {})
    blocks = {
        f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(config.layers)
        for ours, theirs in in_block.items()
    }
    outside = {ours: theirs for ours, theirs in _OUTSIDE.items() if not (config.tied_embeddings and ours == HEAD)}
    return outside | blocks


def check_tensors(shapes: Mapping[str, tuple[int, ...]], config: TransformerConfig) -> None:
    """Raise ``ValueError`` unless these tensors, by their names, are those of a model of this configuration."""
    wanted = _their_shapes(config)
    optional = {THEIR_HEAD} if config.tied_embeddings else set()
    if missing := [name for name in wanted if name not in shapes]:
        raise ValueError(f"the checkpoint has no tensor {missing[0]} (and lacks {len(missing)} in all)")
    if foreign := [name for name in shapes if name not in wanted.keys() | optional and not name.endswith(DERIVED)]:
        raise ValueError(f"the checkpoint has {min(foreign)}, which a model of this configuration has not")
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise ValueError(f"{name} has shape {tuple(shapes[name])}; this configuration has it in {shape}")


def _their_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    table, dim, width = (config.vocab_size, config.dim), config.dim, config.feed_forward_dim
    queries, keys = config.heads * config.head_features, config.key_value_heads * config.head_features
    by_end = {
        "embed_tokens.weight": table,
        "lm_head.weight": table,
        "norm.weight": (dim,),
        "q_proj.weight": (queries, dim),
        "k_proj.weight": (keys, dim),
        "v_proj.weight": (keys, dim),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.weight": (dim, queries),
        "gate_proj.weight": (width, dim),
        "up_proj.weight": (width, dim),
        "down_proj.weight": (dim, width),
    }
    names = their_names(config).values()
    return {name: next(shape for end, shape in by_end.items() if name.endswith(end)) for name in names}
