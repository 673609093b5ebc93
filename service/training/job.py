"""Runs the training job: from a spec to a trained, published model or program, on every rank of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from service.jobs.runtime import ENDING, Completion, RunContext
from service.jobs.spec.train import TrainSpec
from service.parallel import distributed
from service.training.base_loop import BaseLoop
from service.training.loop import Loop
from service.training.programs import ProgramLoop, prepare_training
from service.training.setup import prepare

LESS_MEMORY = (
    "less is needed with activation_checkpoint: full, sharding: {reshard: always}, more pipeline.micro_batches, "
    "or more ranks in parallel.dp_shard"
)


def run(spec: TrainSpec, context: RunContext) -> dict[str, Any] | None:
    """Train by ``spec``; every rank calls this, rank 0 returns the result.

    Resumes from the newest complete checkpoint of the job. When the attempt is asked to stop, a checkpoint is written
    and the result says ``stopped``; ``completed`` counts the steps. Raises ``NonFiniteError`` when loss or gradient
    stop being numbers, ``GateError`` when compilation isn't allowed, ``ValueError`` for a spec that doesn't fit the
    data or the mesh.
    """
    with joined(context.device_type) as device, _advising_where_memory_ends():
        loop = _loop(spec, context, device)
        loop.resume()
        loop.begin()
        context.report.phase("first step")
        with loop.advising(), loop.checkpoints.saver:
            finished = loop.train()
            context.report.phase(ENDING)
            loop.save()
            evaluation = loop.evaluation() if finished else {}
        if context.rank != 0:
            return None
        if finished:
            loop.publish()
        loop.history.write()
        context.report.artifact(loop.history.path, "application/vnd.apache.parquet")
        result = _result(loop, evaluation, stopped=not finished)
        loop.journal.ended(loop.step, loop.loss, loop.early_end())
        return result


@contextmanager
def _advising_where_memory_ends() -> Iterator[None]:
    """Add to a device's :class:`torch.OutOfMemoryError` what makes a training need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{error}; {LESS_MEMORY}") from error


def _loop(spec: TrainSpec, context: RunContext, device: torch.device) -> BaseLoop:
    if spec.program is not None:
        return ProgramLoop(spec, prepare_training(spec, context, device))
    return Loop(prepare(spec, context, device))


def _result(loop: BaseLoop, evaluation: Mapping[str, float], *, stopped: bool) -> dict[str, Any]:
    early = loop.early_end()
    return {
        "loss": loop.loss,
        **evaluation,
        "steps": loop.step,
        **loop.facts(),
        "seconds": loop.watch.seconds,
        "stopped": stopped,
        **({} if early is None else {"ended_early": early}),
        "completed": Completion(done=loop.step, total=loop.spec.steps if early is None else loop.step, unit="steps"),
    }


@contextmanager
def joined(device_type: str) -> Iterator[torch.device]:
    """Yield this rank's device, in the launcher's process group; leave the group if this call joined it and
    nothing failed.

    After an error the process is about to end, and leaving would wait for peers that may never come.
    """
    joined_before = dist.is_initialized()
    device = distributed.start(device_type)
    yield device
    if not joined_before:
        distributed.stop()
