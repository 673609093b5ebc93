"""Our transformer's parameter names and theirs. Shapes, and the order of rotary halves, are the same in both."""

from __future__ import annotations

EMBEDDING, HEAD = "embedding.weight", "head.weight"
_OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
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


def their_names(layers: int) -> dict[str, str]:
    """Return their name of each of our parameters."""
    blocks = {
        f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(layers)
        for ours, theirs in _IN_BLOCK.items()
    }
    return _OUTSIDE | blocks
