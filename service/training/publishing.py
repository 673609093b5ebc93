"""Publishes what a finished training leaves: its weights, what is known of them, and the checkpoints that were kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from service.jobs.files import atomic_draft, atomic_write
from service.jobs.runtime import RunContext
from service.jobs.spec.arithmetic import DtypeName
from service.jobs.spec.data import FileTokens
from service.jobs.spec.model import TransformerConfig
from service.models import FamilyConfig, huggingface
from service.parallel import checkpoint
from service.training.checkpoints import MODEL_PREFIX
from service.training.setup import Training


def publish_model(training: Training, step: int) -> None:
    """Publish the finished model and the checkpoints that were kept, without a collective."""
    tokenizer = _tokenizer(training)
    config = training.config.model_dump(mode="json")
    weights = publish_weights(training.context, step, {"config": config, **training.origin})
    if (dtype := training.spec.export.huggingface) is not None:
        training.context.report.artifact(_export_huggingface(weights, training.config, dtype, tokenizer))


def publish_weights(context: RunContext, step: int, about: Mapping[str, Any]) -> Path:
    """Publish ``model.safetensors`` with ``model.json``, which says ``about``, and the checkpoints that were kept;
    return the path of the weights.
    """
    saved = checkpoint.require(context.paths.checkpoints / f"step_{step}")
    weights, description = _export(saved, context.paths.artifacts, about)
    context.report.artifact(weights)
    context.report.artifact(description, "application/json")
    for kept in checkpoint.complete(context.paths.checkpoints):
        context.report.artifact(kept.path)
    return weights


def _export_huggingface(weights: Path, config: FamilyConfig, dtype: DtypeName, tokenizer: Path | None = None) -> Path:
    """Write the folder ``huggingface`` from, and beside, ``model.safetensors``; see :func:`huggingface.write`."""
    folder = weights.with_name("huggingface")
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"expected a transformer, got {type(config).__name__}")
    huggingface.write(folder, config, load_file(weights), dtype, tokenizer)
    return folder


def _export(saved: checkpoint.Checkpoint, folder: Path, about: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write ``model.safetensors`` (whole tensors, plain names) and ``model.json`` from a checkpoint; no collective.

    ``model.json`` is ``{step, **about, sha256}``, the last of the weights. Each file appears complete or not at all,
    the weights first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / "model.safetensors", folder / "model.json"
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.load_whole(saved.path, MODEL_PREFIX).items()}
    with atomic_draft(weights) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
        digest = checkpoint.digest_of(draft)
    atomic_write(described, json.dumps({"step": saved.step, **about, "sha256": digest}, indent=2).encode())
    return weights, described


def _tokenizer(training: Training) -> Path | None:
    """Return the ``tokenizer.json`` that made the job's tokens from a text, if any."""
    data = training.spec.data
    if not isinstance(data, FileTokens) or data.tokenizer is None:
        return None
    return training.context.data.file(data.tokenizer)
