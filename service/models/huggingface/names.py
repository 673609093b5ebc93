"""Our transformer's parameter names and theirs. Shapes, and the order of rotary halves, are the same in both."""

from __future__ import annotations

from service.jobs.spec.families import TransformerConfig

EMBEDDING, HEAD = "embedding.weight", "head.weight"
THEIR_EMBEDDING, THEIR_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {EMBEDDING: THEIR_EMBEDDING, "norm.weight": "model.norm.weight", HEAD: THEIR_HEAD}
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
DERIVED = "rotary_emb.inv_freq"
"""What old checkpoints also hold: it follows from the configuration."""


def their_names(config: TransformerConfig) -> dict[str, str]:
    """Return their name of each of our parameters; a head that is tied to the embedding has none of its own."""
    blocks = {
        f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(config.layers)
        for ours, theirs in _IN_BLOCK.items()
    }
    outside = {ours: theirs for ours, theirs in _OUTSIDE.items() if not (config.tied_embeddings and ours == HEAD)}
    return outside | blocks
