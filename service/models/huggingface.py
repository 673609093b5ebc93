"""Reads and writes Llama-style checkpoints as Hugging Face's libraries lay them out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from service.formats.llama import THEIR_EMBEDDING, THEIR_HEAD, check_tensors, read_config, their_names, write_config
from service.formats.weights import CONFIG, INDEX, unpack, unwrapped, weight_files
from service.jobs.files import DataLayout, atomic_draft
from service.jobs.spec.arithmetic import DtypeName
from service.jobs.spec.families import TransformerConfig
from service.models.full_weights import WeightsError
from service.parallel.containers import in_batches
from service.parallel.distributed import build_once

__all__ = ["load", "tensors_of", "write"]


def load(file: str, layout: DataLayout) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Return the model in an uploaded archive. Raises :class:`WeightsError`.

    The archive is unpacked once, by the first rank. Tensors are mapped, so a rank reads only the parts that it uses.
    """
    archive = layout.file(file)
    if not archive.is_file():
        raise WeightsError(f"model.huggingface: there is no uploaded file {file} in the data directory")
    try:
        folder = _unpacked(file, layout)
        values = json.loads((folder / CONFIG).read_bytes())
        config, tensors = read_config(values), _tensors(folder)
        return config, _renamed(tensors, config)
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise WeightsError(f"model.huggingface: {file}: {error}") from error


def tensors_of(file: str, layout: DataLayout) -> dict[str, Tensor]:
    """Return the tensors in an uploaded archive by their names there, mapped as :func:`load` maps them. Raises
    ``ArchiveError``.
    """
    folder = _unpacked(file, layout)
    return _tensors(folder)


def _unpacked(file: str, layout: DataLayout) -> Path:
    return build_once(layout.cache / "huggingface" / file, partial(unpack, layout.file(file)))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors by their names without wrappers, from the files that the index names, or without an index from
    all.
    """
    found: dict[str, Tensor] = {}
    files = weight_files([path.name for path in folder.iterdir()], (folder / INDEX).read_bytes)
    for file, elsewhere in files.items():
        with safe_open(folder / file, framework="pt") as shard:
            for held in shard.keys():  # noqa: SIM118 - not a mapping
                name = unwrapped(held)
                if held in elsewhere:
                    continue
                if name in found:
                    raise WeightsError(f"{name} is in several files, and no {INDEX} says which one counts")
                found[name] = shard.get_tensor(held)
    return found


def _renamed(tensors: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    names = their_names(config)
    if config.tied_embeddings:
        tensors = _without_second_table(tensors)
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config)
    return {ours: tensors[theirs] for ours, theirs in names.items()}


def _without_second_table(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a tied model without the head's, which some files repeat."""
    head, embedding = tensors.get(THEIR_HEAD), tensors.get(THEIR_EMBEDDING)
    if head is None or embedding is None:
        return tensors
    if not torch.equal(head, embedding):
        raise WeightsError(
            f"{CONFIG} says tie_word_embeddings: true, but {THEIR_HEAD} differs from {THEIR_EMBEDDING}; say false to "
            f"train them apart, or leave {THEIR_HEAD} out"
        )
    return {name: tensor for name, tensor in tensors.items() if name != THEIR_HEAD}


SHARD_BYTES = 5 * 10**9
"""Size of a file from which their library starts the next."""


def write(
    folder: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    dtype: DtypeName,
    tokenizer: Path | None = None,
) -> None:
    """Write ``config.json`` and safetensors files; ``folder`` appears complete or not at all, in place of an old one.

    A table that embedding and head share is written once. ``tokenizer`` is a ``tokenizer.json`` that goes with them.
    """
    from service.parallel.fsdp import torch_dtype  # noqa: PLC0415 - FSDP takes long to import, and few jobs need this

    wanted, names = torch_dtype(dtype), their_names(config)
    tensors = {theirs: weights[ours].to(wanted).contiguous() for ours, theirs in names.items()}
    with atomic_draft(folder) as draft:
        draft.mkdir(parents=True)
        (draft / CONFIG).write_text(json.dumps(write_config(config, dtype), indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
            described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_sequence}
            (draft / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
        _write_shards(draft, tensors)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    shards = [dict(batch) for batch in in_batches(tensors.items(), SHARD_BYTES)]
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
