"""Makes Llama-style checkpoints, for the tests of reading and writing them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from training_runs import upload

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def head_features(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def checkpoint_tensors(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights by the names and shapes of ``LlamaForCausalLM``."""
    generator = torch.Generator().manual_seed(1)
    dim, width = config["hidden_size"], config["intermediate_size"]
    broad, narrow = (head_features(config) * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.q_proj.weight": (broad, dim), f"{prefix}self_attn.o_proj.weight": (dim, broad)}
        if config["model_type"] == "qwen2":
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": (broad if name == "q" else narrow,) for name in "qkv"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (narrow, dim) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (width, dim) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (dim, width)
    drawn = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return {name: (tensor + 1 if "norm" in name else tensor).to(dtype) for name, tensor in drawn.items()}


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def packed(folder: Path, form: str) -> bytes:
    """The files of ``folder`` in an archive, below a folder of its own."""
    buffer = io.BytesIO()
    if form == "tar":
        with tarfile.open(fileobj=buffer, mode="w:") as tar:
            tar.add(folder, arcname="llama")
    else:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
            for path in folder.iterdir():
                opened.write(path, f"llama/{path.name}")
    return buffer.getvalue()


def upload_checkpoint(root: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], form: str = "tar") -> str:
    root.mkdir(exist_ok=True)
    write_checkpoint(root / "source", config, tensors)
    return upload(root, packed(root / "source", form))
