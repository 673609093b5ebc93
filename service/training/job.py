"""Runs the training job: from a spec to a trained, published model, on every rank of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from service.jobs.runtime import ENDING, Completion, RunContext
from service.jobs.spec.data import FileTokens
from service.jobs.spec.train import TrainSpec
from service.parallel import checkpoint, distributed
from service.training.loop import Loop
from service.training.setup import Training, prepare
from service.training.state import export_huggingface, export_model


def run(spec: TrainSpec, context: RunContext) -> dict[str, Any] | None:
    """Train as ``spec`` says; every rank calls this, rank 0 returns the result.

    Takes up the newest complete checkpoint of the job. When the attempt is asked to stop, a checkpoint is written and
    the result says ``stopped``; ``completed`` counts the steps. Raises ``NonFiniteError`` when loss or gradient stop
    being numbers, ``GateError`` when compilation isn't allowed, ``ValueError`` for a spec that doesn't fit the data or
    the mesh.
    """
    with _joined(context.device_type) as device:
        training = prepare(spec, context, device)
        loop = Loop(training)
        loop.resume()
        loop.journal.begin(loop.step)
        context.report.phase("first step")
        with loop.saver:
            finished = loop.train()
            context.report.phase(ENDING)
            loop.save()
            evaluation = loop.evaluate() if finished else {}
        if context.rank != 0:
            return None
        if finished:
            _publish(training, loop)
        loop.history.write()
        context.report.artifact(loop.history.path, "application/vnd.apache.parquet")
        loop.journal.ended(loop.step, loop.loss)
        completed = Completion(done=loop.step, total=spec.steps, unit="steps")
        return {**loop.summary(evaluation, stopped=not finished), "completed": completed}


def _publish(training: Training, loop: Loop) -> None:
    """Publish the finished model and the checkpoints that were kept, without a collective."""
    paths, report = training.context.paths, training.context.report
    saved = checkpoint.require(paths.checkpoints / f"step_{loop.step}")
    weights, about = export_model(saved, paths.artifacts, training.config, training.origin)
    report.artifact(weights)
    report.artifact(about, "application/json")
    if (dtype := training.spec.export.huggingface) is not None:
        report.artifact(export_huggingface(weights, training.config, dtype, _tokenizer(training)))
    for kept in checkpoint.complete(paths.checkpoints):
        report.artifact(kept.path)


def _tokenizer(training: Training) -> Path | None:
    """Return the ``tokenizer.json`` that made the job's tokens of a text, if one did."""
    data = training.spec.data
    if not isinstance(data, FileTokens) or data.tokenizer is None:
        return None
    return training.context.data.file(data.tokenizer)


@contextmanager
def _joined(device_type: str) -> Iterator[torch.device]:
    """Yield this rank's device, in the launcher's process group; leave the group if this call joined it and all
    went well.

    After an error the process is about to end, and leaving would wait for peers that may never come.
    """
    joined_before = dist.is_initialized()
    device = distributed.start(device_type)
    yield device
    if not joined_before:
        distributed.stop()
