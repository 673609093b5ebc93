"""Forward and backward over one rank's part of a batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from service.jobs.spec.train import TrainSpec
from service.models.data import Split
from service.parallel.fsdp import synchronize_gradients
from service.parallel.mesh import Mesh
from service.parallel.pipeline.runtime import PipelineRuntime, Work
from service.schedules import forward_only, generator
from service.schedules.schedule import Schedule
from service.training.objective import Objective


class Engine(Protocol):
    """How a rank computes its part of a step."""

    def forward_backward(self, batch: Split) -> Tensor:
        """Leave the gradients of the *global* batch's mean loss in the parameters.

        ``batch`` is this rank's share. Returns the share's part of that loss, a scalar without gradient; zero where
        this rank doesn't compute it.
        """

    def evaluate(self, batch: Split, valid: int) -> Tensor:
        """Loss and correct predictions summed over the first ``valid`` samples, float64 ``(2,)``; zero likewise."""


@dataclass(frozen=True)
class AccumulationEngine:
    """The whole model on this rank (or its tensor-parallel part): micro-batches one after another.

    Each loss is divided by the global batch size before its backward; FSDP and accumulation then only add.
    """

    model: nn.Module
    objective: Objective
    micro_batches: int
    global_batch: int

    def forward_backward(self, batch: Split) -> Tensor:
        total = torch.zeros((), device=batch.inputs.device)
        for index, micro in enumerate(chunks(batch, self.micro_batches)):
            synchronize_gradients(self.model, is_last=index == self.micro_batches - 1)
            mean = self.objective.mean(self.model(micro.inputs), micro.targets)
            loss = mean * (len(micro) / self.global_batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def evaluate(self, batch: Split, valid: int) -> Tensor:
        with evaluating(self.model):
            return self.objective.totals(self.model(batch.inputs)[:valid], batch.targets[:valid])


@dataclass(frozen=True)
class PipelineEngine:
    """One stage of the model on this rank: micro-batches move through the pipeline as ``schedule`` says.

    ``evaluation`` has the same micro-batches, forward only.
    """

    model: nn.Module
    objective: Objective
    runtime: PipelineRuntime
    schedule: Schedule
    evaluation: Schedule
    global_batch: int

    def forward_backward(self, batch: Split) -> Tensor:
        micro = list(chunks(batch, self.schedule.micro_batches))
        weights = [len(each) / self.global_batch for each in micro]
        work = Work(
            objective=self.objective.mean,
            inputs=[each.inputs for each in micro],
            targets=[each.targets for each in micro],
            weights=weights,
        )
        values = self.runtime.run(self.schedule, work)
        total = torch.zeros((), device=batch.inputs.device)
        return total + sum(value * weight for value, weight in zip(values, weights, strict=False))

    def evaluate(self, batch: Split, valid: int) -> Tensor:
        micro = list(chunks(batch, self.evaluation.micro_batches))
        size = len(micro[0])
        work = Work(
            # The targets are cut to those that count, and the logits to as many.
            objective=lambda logits, targets: self.objective.totals(logits[: len(targets)], targets),
            inputs=[each.inputs for each in micro],
            targets=[batch.targets[:valid][start : start + size] for start in range(0, len(batch), size)],
        )
        with evaluating(self.model):
            values = self.runtime.run(self.evaluation, work)
        return sum(values, torch.zeros(2, dtype=torch.float64, device=batch.inputs.device))


def build_engine(model: nn.Module, objective: Objective, spec: TrainSpec, mesh: Mesh, device: torch.device) -> Engine:
    """The engine for this mesh; all ranks call it, since a pipeline connects its stages here."""
    global_batch, micro_batches, stages = spec.batch.global_, spec.micro_batches, mesh.pp.size
    if stages == 1:
        return AccumulationEngine(model, objective, micro_batches, global_batch)
    return PipelineEngine(
        model=model,
        objective=objective,
        runtime=PipelineRuntime({mesh.pp.rank: model}, mesh, device=device),
        schedule=generator(spec.pipeline.schedule)(stages, 1, micro_batches),
        evaluation=forward_only(tuple(range(stages)), micro_batches),
        global_batch=global_batch,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, and evaluation behaviour where a layer has one."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def chunks(batch: Split, count: int) -> Iterator[Split]:
    """``count`` equal parts in order; ``batch`` must divide."""
    size, rest = divmod(len(batch), count)
    if rest:
        raise ValueError(f"a rank's share of {len(batch)} samples does not divide into {count} micro-batches")
    for start in range(0, len(batch), size):
        yield Split(batch.inputs[start : start + size], batch.targets[start : start + size])
