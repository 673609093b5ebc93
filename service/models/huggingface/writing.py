"""Write whole weights as a folder that Hugging Face's libraries read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from service.formats.archive import CONFIG, INDEX
from service.formats.llama import their_names, write_config
from service.jobs.atomic import atomic_draft
from service.jobs.spec.families import TransformerConfig

SHARD_BYTES = 5 * 10**9
"""Size of a file from which their library starts the next."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write(
    folder: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    dtype: Literal["fp32", "bf16"],
    tokenizer: Path | None = None,
) -> None:
    """Write ``config.json`` and safetensors files; ``folder`` appears complete or not at all, in place of an old one.

    A table that embedding and head share is written once. ``tokenizer`` is a ``tokenizer.json`` that goes with them.
    """
    names = their_names(config)
    tensors = {theirs: weights[ours].to(TYPES[dtype]).contiguous() for ours, theirs in names.items()}
    with atomic_draft(folder) as draft:
        draft.mkdir(parents=True)
        (draft / CONFIG).write_text(json.dumps(write_config(config, dtype), indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
            described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_sequence}
            (draft / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
        _write_shards(draft, tensors)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    shards = _shards(tensors)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
