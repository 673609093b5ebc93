"""Runs the training job: from a spec to a trained, published model, on every rank of the mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from service.jobs.files import atomic_draft, atomic_write
from service.jobs.runtime import ENDING, Completion, RunContext
from service.jobs.spec.arithmetic import DtypeName
from service.jobs.spec.data import FileTokens
from service.jobs.spec.model import TransformerConfig
from service.jobs.spec.train import TrainSpec
from service.models import FamilyConfig, huggingface
from service.parallel import checkpoint, distributed
from service.training.checkpoints import MODEL_PREFIX
from service.training.loop import Loop
from service.training.setup import Training, prepare


def run(spec: TrainSpec, context: RunContext) -> dict[str, Any] | None:
    """Train by ``spec``; every rank calls this, rank 0 returns the result.

    Resumes from the newest complete checkpoint of the job. When the attempt is asked to stop, a checkpoint is written
    and the result says ``stopped``; ``completed`` counts the steps. Raises ``NonFiniteError`` when loss or gradient
    stop being numbers, ``GateError`` when compilation isn't allowed, ``ValueError`` for a spec that doesn't fit the
    data or the mesh.
    """
    with _joined(context.device_type) as device:
        training = prepare(spec, context, device)
        loop = Loop(training)
        loop.resume()
        loop.journal.begin(loop.step)
        context.report.phase("first step")
        with loop.advising(), loop.checkpoints.saver:
            finished = loop.train()
            context.report.phase(ENDING)
            loop.save()
            evaluation = loop.evaluation() if finished else {}
        if context.rank != 0:
            return None
        if finished:
            _publish(training, loop)
        loop.history.write()
        context.report.artifact(loop.history.path, "application/vnd.apache.parquet")
        result = _result(loop, evaluation, stopped=not finished)
        loop.journal.ended(loop.step, loop.loss, loop.early_end())
        return result


def _result(loop: Loop, evaluation: Mapping[str, float], *, stopped: bool) -> dict[str, Any]:
    early = loop.early_end()
    return {
        "loss": loop.loss,
        **evaluation,
        "steps": loop.step,
        "parameters": loop.training.parameters,
        "seconds": loop.watch.seconds,
        "data_sha256": loop.training.dataset.sha256,
        "stopped": stopped,
        **({} if early is None else {"ended_early": early}),
        "completed": Completion(done=loop.step, total=loop.spec.steps if early is None else loop.step, unit="steps"),
    }


def _publish(training: Training, loop: Loop) -> None:
    """Publish the finished model and the checkpoints that were kept, without a collective."""
    paths, report = training.context.paths, training.context.report
    saved = checkpoint.require(paths.checkpoints / f"step_{loop.step}")
    tokenizer = _tokenizer(training)
    weights, about = _export_model(saved, paths.artifacts, training.config, training.origin)
    report.artifact(weights)
    report.artifact(about, "application/json")
    if (dtype := training.spec.export.huggingface) is not None:
        report.artifact(_export_huggingface(weights, training.config, dtype, tokenizer))
    for kept in checkpoint.complete(paths.checkpoints):
        report.artifact(kept.path)


def _export_huggingface(weights: Path, config: FamilyConfig, dtype: DtypeName, tokenizer: Path | None = None) -> Path:
    """Write the folder ``huggingface`` from, and beside, ``model.safetensors``; see :func:`huggingface.write`."""
    folder = weights.with_name("huggingface")
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"expected a transformer, got {type(config).__name__}")
    huggingface.write(folder, config, load_file(weights), dtype, tokenizer)
    return folder


def _export_model(
    saved: checkpoint.Checkpoint, folder: Path, config: FamilyConfig, origin: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write ``model.safetensors`` (whole tensors, plain names) and ``model.json`` from a checkpoint; no collective.

    ``model.json`` is ``{step, config, parallel, data_sha256, sha256}``, the last of the weights.
    Each file appears complete or not at all, the weights first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, about = folder / "model.safetensors", folder / "model.json"
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.load_whole(saved.path, MODEL_PREFIX).items()}
    with atomic_draft(weights) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
        digest = checkpoint.digest_of(draft)
    description = {"step": saved.step, "config": config.model_dump(mode="json"), **origin, "sha256": digest}
    atomic_write(about, json.dumps(description, indent=2).encode())
    return weights, about


def _tokenizer(training: Training) -> Path | None:
    """Return the ``tokenizer.json`` that made the job's tokens from a text, if any."""
    data = training.spec.data
    if not isinstance(data, FileTokens) or data.tokenizer is None:
        return None
    return training.context.data.file(data.tokenizer)


@contextmanager
def _joined(device_type: str) -> Iterator[torch.device]:
    """Yield this rank's device, in the launcher's process group; leave the group if this call joined it and
    nothing failed.

    After an error the process is about to end, and leaving would wait for peers that may never come.
    """
    joined_before = dist.is_initialized()
    device = distributed.start(device_type)
    yield device
    if not joined_before:
        distributed.stop()
