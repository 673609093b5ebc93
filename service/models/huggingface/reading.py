"""Read our configuration and weights from an uploaded archive."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.formats.archive import CONFIG, INDEX, unpack, unwrapped, weight_files
from service.formats.llama import THEIR_EMBEDDING, THEIR_HEAD, check_tensors, read_config, their_names
from service.jobs.layout import DataLayout
from service.jobs.spec.families import TransformerConfig
from service.models.build_once import build_once
from service.models.full_weights import WeightsError


def load(file: str, layout: DataLayout) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Return the model in an uploaded archive. Raises :class:`WeightsError`.

    The archive is unpacked once, by the first rank. Tensors are mapped, so a rank reads only the parts that it uses.
    """
    archive = layout.file(file)
    if not archive.is_file():
        raise WeightsError(f"model.huggingface: there is no uploaded file {file} in the data directory")
    try:
        folder = build_once(layout.cache / "huggingface" / file, partial(unpack, archive))
        values = json.loads((folder / CONFIG).read_bytes())
        config = read_config(values)
        return config, _renamed(_tensors(folder), config)
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise WeightsError(f"model.huggingface: {file}: {error}") from error


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors by their names without wrappers, of the files that the index names, or of all files where
    there is none.
    """
    found: dict[str, Tensor] = {}
    for path in _shards(folder):
        with safe_open(path, framework="pt") as shard:
            for held in shard.keys():  # noqa: SIM118 - not a mapping
                name = unwrapped(held)
                if name in found:
                    raise WeightsError(f"{name} is in several files, and no {INDEX} says which one counts")
                found[name] = shard.get_tensor(held)
    return found


def _shards(folder: Path) -> list[Path]:
    names = [path.name for path in folder.iterdir()]
    return [folder / name for name in weight_files(names, (folder / INDEX).read_bytes)]


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
