"""Runs the inference of a program, over a data source or its own batches, on every rank of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from service.jobs.runtime import ENDING, Completion, RunContext, Stopwatch
from service.jobs.spec.run import RunSpec
from service.models import WeightsError, data
from service.models.data import Samples
from service.models.program import Program, Step
from service.parallel import checkpoint
from service.training.checkpoints import MODEL_PREFIX, newest_checkpoint
from service.training.job import joined
from service.training.loop import batches
from service.training.programs.failures import LackingError
from service.training.programs.outputs import OutputFiles
from service.training.programs.setup import FIRST, PreparedProgram, prepare_program, takes
from service.training.programs.steps import ProgramSteps

BATCHES = "batches"
"""The argument by which ``inference`` gets the inputs of a data source, a tensor for each step."""


@dataclass(frozen=True)
class _SourceBatches:
    """The rows of a data source for each step of this rank, and how many of them count: the last are filled up."""

    samples: Samples
    rows: list[tuple[Tensor, int]]
    device: torch.device

    @classmethod
    def of(cls, spec: RunSpec, ready: PreparedProgram) -> _SourceBatches | None:
        if spec.data is None:
            return None
        samples, dp = data.load(spec.data, ready.context.data).test, ready.mesh.dp
        return cls(samples, batches(len(samples), spec.batch, dp.rank, dp.size), ready.device)

    def inputs(self, first: int) -> Iterator[Tensor]:
        """Yield the inputs of each step from ``first`` on."""
        for rows, _ in self.rows[first:]:
            yield self.samples.take(rows).to(self.device).inputs

    def cut(self, step: int, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs without the rows that filled up a batch, where they have a row for each sample."""
        rows, valid = self.rows[step]
        return {
            name: value[:valid] if value.dim() and len(value) == len(rows) else value for name, value in outputs.items()
        }


def run(spec: RunSpec, context: RunContext) -> dict[str, Any] | None:
    """Run the program by ``spec``; every rank calls this, rank 0 returns the result.

    Each rank writes the outputs of its steps; a later attempt goes on after the last whole file.
    """
    with joined(context.device_type) as device:
        ready = prepare_program(spec, context, device, lambda program: _check_able(spec, program))
        trained = _take_weights(spec, ready)
        feed = _SourceBatches.of(spec, ready)
        runner = _Inference(spec, ready, feed)
        if context.rank == 0:
            context.report.log(f"program: {ready.described}{trained}")
            context.report.log(f"inference: {runner.total:,} steps, from step {runner.step:,} on")
        context.report.phase("first step")
        watch = Stopwatch()
        while runner.step < runner.total and not _stopped(context, device):
            runner.advance()
        context.report.phase(ENDING)
        if runner.step == runner.total:
            runner.files.write(runner.total - 1)
        if dist.is_initialized():
            dist.barrier()  # every rank's files are there
        if context.rank != 0:
            return None
        if runner.files.folder.is_dir():
            context.report.artifact(runner.files.folder)
        done = Completion(done=runner.step, total=runner.total, unit="steps")
        return {**ready.facts(), "steps": runner.step, "seconds": watch.seconds, "completed": done}


class _Inference:
    """Steps the inference on this rank; ``step`` counts those that are done."""

    def __init__(self, spec: RunSpec, ready: PreparedProgram, feed: _SourceBatches | None) -> None:
        self.total = spec.steps or (len(feed.rows) if feed else 0)
        self.files = OutputFiles(ready.context.paths.artifacts / "outputs", ready.context.rank)
        self.step = self._begins_at(ready, feed)
        self._ready, self._feed = ready, feed
        given = {BATCHES: feed.inputs(self.step)} if feed else {}
        self._steps = ProgramSteps(ready, "inference", self.step, **given)

    def advance(self) -> None:
        """Run one step, keep its outputs, and report its numbers."""
        ready, watch, eager = self._ready, Stopwatch(), self._ready.calls.eager
        found = self._steps.run(self.step)
        outputs = dict(found.outputs)
        self.files.add(self.step, self._feed.cut(self.step, outputs) if self._feed else outputs)
        self.step += 1
        if ready.context.rank == 0:
            metrics = _numbers(found) | {"step_ms": watch.seconds * 1e3}
            if ready.compile_modes:
                metrics["eager_calls"] = ready.calls.eager - eager
            ready.context.report.metric(self.step, metrics)
            ready.context.report.progress(self.step, self.total, "steps")

    def _begins_at(self, ready: PreparedProgram, feed: _SourceBatches | None) -> int:
        """Return the steps that every rank has in whole files; a program with batches of its own must be able to go on
        from there.
        """
        if feed is None and not takes(ready.program.inference, FIRST):
            return 0
        done = torch.tensor(min(self.files.done(), self.total), device=ready.device)
        if dist.is_initialized():
            dist.all_reduce(done, dist.ReduceOp.MIN)
        return int(done)


def _check_able(spec: RunSpec, program: Program) -> None:
    if spec.data is not None and not takes(program.inference, BATCHES):
        raise LackingError(
            f"data.source={spec.data.source}: program {spec.program.name!r} reads no data; expected "
            f"inference(parts, boundary, {BATCHES}), an iterator of inputs, or steps over its own batches"
        )


def _take_weights(spec: RunSpec, ready: PreparedProgram) -> str:
    """Load the weights of a training of the program, if the spec names one; return words about them."""
    if spec.weights is None:
        return ""
    step = None if spec.weights.step == "latest" else spec.weights.step
    found = newest_checkpoint(ready.context.data.job(spec.weights.job).checkpoints, step)
    if found is None:
        raise WeightsError(f"weights.job: {spec.weights.job} has no checkpoint of step {spec.weights.step!r}")
    state = {f"{MODEL_PREFIX}{name}": value.detach() for name, value in ready.parts.members().items()}
    try:
        checkpoint.load(found.path, state)
    except ValueError as error:
        raise WeightsError(f"weights.job: {spec.weights.job}: {error}") from error
    return f", weights of step {found.step} of {spec.weights.job}"


def _stopped(context: RunContext, device: torch.device) -> bool:
    """Return whether any rank was asked to stop: all end with the same step."""
    asked = torch.tensor(context.should_stop(), dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(asked, dist.ReduceOp.MAX)
    return bool(asked)


def _numbers(step: Step) -> dict[str, float]:
    """Return the outputs and losses that are one number, by name."""
    both = {**step.outputs, **step.losses}
    return {name: float(value) for name, value in both.items() if value.numel() == 1 and not value.is_complex()}
