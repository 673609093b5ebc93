"""Writes the finished model in forms that need no knowledge of layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from service.jobs.atomic import atomic_draft, atomic_write
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.train import ExportSpec
from service.models import FamilyConfig, huggingface
from service.parallel import checkpoint
from service.training.state import MODEL_PREFIX


def export_model(
    saved: checkpoint.Checkpoint, folder: Path, config: FamilyConfig, origin: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write ``model.safetensors`` (whole tensors, plain names) and ``model.json`` from a checkpoint; no collective.

    ``model.json`` is ``{step, config, parallel, data_sha256}``.
    Each file appears complete or not at all, the weights first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, about = folder / "model.safetensors", folder / "model.json"
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.load_whole(saved.path, MODEL_PREFIX).items()}
    with atomic_draft(weights) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
    description = {"step": saved.step, "config": config.model_dump(mode="json"), **origin}
    atomic_write(about, json.dumps(description, indent=2).encode())
    return weights, about


def check_export(export: ExportSpec, config: FamilyConfig) -> None:
    """Raise ``ValueError`` for a form that the model cannot be written in."""
    if export.huggingface is not None and not isinstance(config, TransformerConfig):
        raise ValueError(
            f"export.huggingface={export.huggingface!r} needs a transformer; this model is of family {config.family!r}"
        )


def export_huggingface(
    weights: Path, config: FamilyConfig, dtype: Literal["fp32", "bf16"], tokenizer: Path | None = None
) -> Path:
    """Write the folder ``huggingface`` from, and beside, ``model.safetensors``; see :func:`huggingface.write`."""
    folder = weights.with_name("huggingface")
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"expected a transformer, got {type(config).__name__}")
    huggingface.write(folder, config, load_file(weights), dtype, tokenizer)
    return folder
