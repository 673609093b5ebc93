"""Forward and backward over one rank's part of a batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from service.jobs.plugins import IGNORED
from service.jobs.spec.train import TrainSpec
from service.models.data import Split
from service.models.modes import modes_kept
from service.objectives import Objective
from service.parallel.boundary import StepBoundary
from service.parallel.collectives import agree, resolve
from service.parallel.fsdp import (
    PartlyUsed,
    before_backward,
    free_parameters,
    is_static,
    synchronize_gradients,
)
from service.parallel.mesh import Mesh
from service.parallel.pipeline.runtime import PipelineRuntime, Work
from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from service.schedules import forward_only
from service.schedules.schedule import Op, Schedule
from service.training.timeline import Timeline, timeline

Shares = Callable[[Sequence[Split]], Sequence[float | Tensor]]
"""Returns for each micro-batch of this rank its labels that count, as a share of those of the global batch; all ranks
call it together.
"""


@dataclass(frozen=True)
class SharesOfSamples:
    """Shares where every label counts, and each sample has as many."""

    global_batch: int

    def __call__(self, micro_batches: Sequence[Split]) -> list[float]:
        return [len(each) / self.global_batch for each in micro_batches]


@dataclass(frozen=True)
class SharesOfLabels:
    """Shares where labels may be ignored: they are counted over the data-parallel ``group`` in each step."""

    group: str

    def __call__(self, micro_batches: Sequence[Split]) -> list[Tensor]:
        counts = torch.stack([(each.targets != IGNORED).sum() for each in micro_batches])
        total = counts.sum()
        if self.group:
            dist.all_reduce(total, group=resolve(self.group))
        return list((counts.double() / total.clamp(min=1)).unbind())


class Engine(Protocol):
    """Computes a rank's part of a step. ``timeline`` tells its device's work, if that is measured."""

    @property
    def timeline(self) -> Timeline[Any] | None:
        """Return the device's work; ``None`` if it is not measured."""

    def forward_backward(self, batch: Split) -> Tensor:
        """Leave the gradients of the mean loss over the *global* batch's labels in the parameters.

        ``batch`` is this rank's share. Returns the share's part of that loss, float64 without gradient; zero if
        this rank does not compute it.
        """

    def evaluate(self, batch: Split, valid: int) -> Tensor:
        """Return the objective's totals over the first ``valid`` samples, float64 ``(measures,)``; else zero here."""

    def undivided_backwards(self) -> int:
        """Return, after a step, the layers whose backward was to be split on this rank and could not be."""


@dataclass(frozen=True)
class AccumulationEngine:
    """Runs the whole model on this rank (or its tensor-parallel part): micro-batches one after another.

    Each loss is multiplied by its micro-batch's share of the global batch before its backward; FSDP and accumulation
    then only add.
    ``before_backward(model, is_last)`` readies FSDP for the backward of a micro-batch. A model that is sharded and may
    leave out parameters is ``partly_used``. The model is called across ``boundary``, whose steps the loop begins.
    """

    model: nn.Module
    objective: Objective
    micro_batches: int
    shares: Shares
    boundary: StepBoundary
    before_backward: Callable[[nn.Module, bool], None] = synchronize_gradients
    partly_used: PartlyUsed | None = None
    timeline: None = None

    def forward_backward(self, batch: Split) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
        micro_batches = list(chunks(batch, self.micro_batches))
        for index, (micro, share) in enumerate(zip(micro_batches, self.shares(micro_batches), strict=True)):
            self.before_backward(self.model, index == self.micro_batches - 1)
            output = self.boundary.boundary_call(self.model, micro.inputs)
            loss = self.objective.mean(output, micro.targets) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.partly_used is not None:
            self.partly_used.settle()
        return total

    def evaluate(self, batch: Split, valid: int) -> Tensor:
        totals = torch.zeros(self.objective.measures, dtype=torch.float64, device=batch.inputs.device)
        with _evaluating([self.model]):
            for micro in chunks(batch, self.micro_batches):
                # The rest of a batch is padding; every rank still runs it, so that collectives stay paired.
                output = self.boundary.boundary_call(self.model, micro.inputs)
                counted = max(min(valid, len(micro)), 0)
                totals += self.objective.totals(output[:counted], micro.targets[:counted])
                valid -= len(micro)
        return totals

    def undivided_backwards(self) -> int:
        return 0


@dataclass(frozen=True)
class _PipelineEngine:
    """Runs this rank's stages of the model: micro-batches move through the pipeline by ``schedule``.

    ``evaluation`` is a schedule of as many micro-batches, forward only. ``partly_used`` are the stages that are sharded
    and may leave out parameters.
    """

    stages: Mapping[int, nn.Module]
    objective: Objective
    runtime: PipelineRuntime
    schedule: Schedule
    evaluation: Schedule
    shares: Shares
    timeline: Timeline[Any]
    partly_used: Sequence[PartlyUsed] = ()

    def forward_backward(self, batch: Split) -> Tensor:
        micro = list(chunks(batch, self.schedule.micro_batches))
        weights = self.shares(micro)
        work = Work(
            objective=self.objective.mean,
            inputs=[each.inputs for each in micro],
            targets=[each.targets for each in micro],
            weights=weights,
        )
        values = self.runtime.run(self.schedule, work)
        for each in self.partly_used:
            each.settle()
        total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
        return total + sum(value.double() * weight for value, weight in zip(values, weights, strict=False))

    def evaluate(self, batch: Split, valid: int) -> Tensor:
        micro = list(chunks(batch, self.evaluation.micro_batches))
        size = len(micro[0])
        work = Work(
            # The padding is cut from targets and logits.
            objective=lambda logits, targets: self.objective.totals(logits[: len(targets)], targets),
            inputs=[each.inputs for each in micro],
            targets=[batch.targets[:valid][start : start + size] for start in range(0, len(batch), size)],
        )
        with _evaluating(self.stages.values()):
            values = self.runtime.run(self.evaluation, work)
        zeros = torch.zeros(self.objective.measures, dtype=torch.float64, device=batch.inputs.device)
        return sum(values, zeros)

    def undivided_backwards(self) -> int:
        if not any(each.op is Op.BACKWARD_WEIGHT for order in self.schedule.ranks for each in order):
            return 0
        parts = (part for stage in self.stages.values() for part in stage.modules())
        layers = sum(isinstance(part, ColumnParallelLinear | RowParallelLinear) for part in parts)
        return layers - self.runtime.split_backwards // self.schedule.micro_batches


def build_engine(
    stages: Mapping[int, nn.Module],
    objective: Objective,
    spec: TrainSpec,
    mesh: Mesh,
    device: torch.device,
    *,
    boundary: StepBoundary,
    schedule: Schedule | None,
    shares: Shares,
) -> Engine:
    """Build the engine over this rank's stages; all ranks call it, since a pipeline connects its stages here.

    Raises :class:`DisagreementError` if the ranks' specs describe different steps.
    """
    _agree_on_steps(spec, schedule)
    group = mesh.dp.group
    partly_used = [PartlyUsed(stage, group) for stage in stages.values() if group and not is_static(stage)]
    if schedule is None:
        before, partly = before_backward(spec.resolved_sharding), next(iter(partly_used), None)
        return AccumulationEngine(stages[0], objective, spec.micro_batches, shares, boundary, before, partly)
    observer = timeline(device)
    runtime = PipelineRuntime(stages, mesh, device=device, owners=schedule.owners, observer=observer, boundary=boundary)
    evaluation = forward_only(schedule.owners, schedule.micro_batches)
    return _PipelineEngine(stages, objective, runtime, schedule, evaluation, shares, observer, partly_used)


def _agree_on_steps(spec: TrainSpec, schedule: Schedule | None) -> None:
    """Compare what the ranks will do in a step, or a rank would wait for messages that no other sends."""
    agree(
        {
            "the number of micro-batches": spec.micro_batches,
            "the global batch": spec.batch.global_,
            "the schedule": "none" if schedule is None else schedule.name,
        }
    )


@contextmanager
def _evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Compute no gradients within, and let layers behave as in evaluation."""
    models = list(models)
    with modes_kept(models), torch.no_grad():
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for model in models:
                free_parameters(model)


def chunks(batch: Split, count: int) -> Iterator[Split]:
    """Yield ``count`` equal parts in order; ``batch`` must divide."""
    size, rest = divmod(len(batch), count)
    if rest:
        raise ValueError(f"a rank's share of {len(batch)} samples does not divide into {count} micro-batches")
    for start in range(0, len(batch), size):
        yield Split(batch.inputs[start : start + size], batch.targets[start : start + size])
