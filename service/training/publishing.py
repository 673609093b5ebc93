"""Publishes what a finished training leaves: its weights, what is known of them, and the checkpoints that were kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from service.formats.weights import PACKAGED
from service.jobs.files import atomic_draft, atomic_write
from service.jobs.runtime import RunContext
from service.jobs.spec.arithmetic import DtypeName
from service.jobs.spec.data import FileTokens
from service.jobs.spec.model import TransformerConfig
from service.models import FamilyConfig, huggingface, load_into
from service.models.packaged.base import Packaged
from service.models.plain import PLAIN, PlainModel
from service.parallel import checkpoint
from service.training.checkpoints import MODEL_PREFIX
from service.training.setup import Training


def publish_model(training: Training, step: int) -> None:
    """Publish the finished model and the checkpoints that were kept, without a collective."""
    tokenizer = _tokenizer(training)
    config = training.outline.config.model_dump(mode="json")
    about = {"config": config, "prefix": _own_prefix(training), **training.origin}
    weights = publish_weights(training.context, step, about)
    if (dtype := training.spec.export.huggingface) is not None:
        training.context.report.artifact(_export_huggingface(weights, training.outline.config, dtype, tokenizer))
    if training.spec.export.onnx:
        _export_onnx(training, weights)


def _own_prefix(training: Training) -> str:
    """Return what begins the names of a module's tensors in the model that was made of it; nothing for our own."""
    for model in training.stages.values():
        if isinstance(model, PlainModel):
            return PACKAGED if isinstance(model.blocks["0"], Packaged) else PLAIN
    return ""


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


def _export_onnx(training: Training, weights: Path) -> None:
    """Write ``model.onnx`` beside ``model.safetensors``, and log by how much the two differ."""
    from service.models.onnx_file import compared_samples, new_model, write_onnx  # noqa: PLC0415 - onnxruntime takes long

    path, samples = weights.with_name("model.onnx"), compared_samples(training.dataset)
    model = new_model(training.outline.config)
    load_into(model, {_own_prefix(training) + name: tensor for name, tensor in load_file(weights).items()})
    difference = write_onnx(training.outline.config, model, samples, path)
    training.context.report.artifact(path)
    told = f"model.onnx: onnxruntime differs from the module by {difference:.1g} on {len(samples)} samples"
    training.context.report.log(told)


def _export(saved: checkpoint.Checkpoint, folder: Path, about: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write ``model.safetensors`` (whole tensors, by the names that the module itself gives them) and ``model.json``
    from a checkpoint; no collective.

    ``model.json`` is ``{step, **about, sha256}``, the last of the weights; its ``prefix`` begins the names of these
    tensors in a model of ours. Each file appears complete or not at all, the weights first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / "model.safetensors", folder / "model.json"
    found, prefix = checkpoint.load_whole(saved.path, MODEL_PREFIX), str(about.get("prefix", ""))
    tensors = {name.removeprefix(prefix): tensor.contiguous() for name, tensor in found.items()}
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
