"""Runs the loop of a model's training: its batches, updates, learning rate and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import set_stance

from service.jobs.runtime import Stopwatch
from service.jobs.spec.compile import Phase
from service.models.data import open_feed
from service.models.held_state import HeldState, digest
from service.models.plain import PlainModel
from service.models.randomness import seeded
from service.objectives import check_learns_nothing
from service.parallel.batch_norm import average_statistics
from service.parallel.collectives import agree
from service.parallel.fsdp import check_only_read, is_static
from service.parallel.tensor.placement import state_buffers
from service.training.base_loop import SPANS_EVERY, BaseLoop
from service.training.checkpoints import ModelCheckpoints
from service.training.gradients import check_weights, clip_, explained_overflow, present, squared_norm
from service.training.journal import Timing, described, step_metrics
from service.training.publishing import publish_model
from service.training.setup import Training
from service.training.step_totals import StepReduction, StepTotals
from service.training.timeline import NO_LOAD

_FIRST_LOOKS = 2
"""The first steps of an attempt, after which it is looked for state that checkpoints would lose: what the first one has
set is seen to change in the second.
"""
_LARGEST_KEPT = 2**20
"""The most entries of an objective's tensor that is looked at."""
_TIMELINES_FIRST = 4
"""The first steps, for which every computation of a pipeline is reported."""


class Loop(BaseLoop):
    """Runs a prepared training of a model."""

    go_on = (
        "lower the learning rate and go on from the last checkpoint by a new job with resume: {job: ID}, or correct "
        "the data and start from its weights by model: {job: ID}"
    )

    def __init__(self, training: Training) -> None:
        super().__init__(training.spec, training.context, training.device, ModelCheckpoints(training))
        self.training = training
        self.parameters = [parameter for stage in training.stages.values() for parameter in stage.parameters()]
        copies = set(map(id, training.tied.copies))  # a tied parameter counts once in the norm of the whole model
        self.counted = [parameter for parameter in self.parameters if id(parameter) not in copies]
        self.stage_ranks = training.mesh.spec.world_size // training.mesh.pp.size
        self.reported_undivided = False
        self.held = [
            HeldState.of_model(stage.blocks["0"], stage.kind)
            if isinstance(stage, PlainModel)
            else HeldState.of_model(stage)
            for stage in training.stages.values()
        ]
        self._looks = _FIRST_LOOKS
        dp = training.mesh.dp
        self.feed = open_feed(training.dataset.train, training.order, dp.rank, dp.size, training.device)

    def begin(self) -> None:
        samples = f" of {self.spec.batch.global_:,} samples"
        self.journal.begin(self.step, described(self.training), samples)

    def publish(self) -> None:
        publish_model(self.training, self.step)

    def facts(self) -> dict[str, Any]:
        return {"parameters": self.training.outline.elements, "data_sha256": self.training.dataset.sha256}

    def check_state(self) -> None:
        check_weights(self.parameters, self.step, self.training.device)
        self._check_held()

    def _check_held(self) -> None:
        """Raise ``ValueError`` for what a step has changed and checkpoints or shards do not hold, and
        :class:`DisagreementError` for a buffer of a plain module that is not the same on all ranks, which all call it.
        """
        for each in self.held:
            each.check()
        self.training.updater.check_state()
        for stage in self.training.stages.values():
            if not is_static(stage):
                check_only_read(stage)
            if isinstance(stage, PlainModel):
                agree({f"the buffer {name!r}": digest(value) for name, value in state_buffers(stage)})

    def _of_objective(self) -> HeldState:
        """Return what the objective keeps, but for large tables and for what belongs to a step's graph."""
        objective = self.training.objective

        def values() -> Iterator[tuple[str, Any]]:
            for name, value in vars(objective).items():
                if not isinstance(value, Tensor) or (not value.requires_grad and value.numel() <= _LARGEST_KEPT):
                    yield name, value

        return HeldState(type(objective).__name__, "mean", values, (type(objective),))

    def measure(self) -> dict[str, float]:
        """Return the metrics over the test split."""
        self.training.objective.begin(self.step - 1)  # as after the step, where a resumed run begins with an evaluation
        self.training.seed("evaluation", self.step)
        with self._phase("inference"), self.training.usage.evaluation(self.step):
            return evaluate(self.training)

    def advance(self) -> StepTotals:
        """Run one optimizer step and return its metrics."""
        training, watch = self.training, Stopwatch()
        with self._step_span("data"):
            batch = self.feed.batch(self.step)
        waited = watch.seconds
        training.objective.begin(self.step)
        of_objective = self._of_objective() if self._looks else None
        training.seed("step", self.step)
        with training.usage.step(self.step):
            training.boundary.step_boundary()
            with self._step_span("forward_backward"), self._phase("train"):
                loss = training.engine.forward_backward(batch)
        with self._step_span("optimizer"):
            share = self.spec.schedule.share(self.step, self.spec.steps, self.evaluations)
            rate = self.spec.optimizer.lr * share
            reduction = self._update(loss, share)
            totals = reduction.read(self.step + 1)
        if not training.outline.config.synchronises:
            for stage in training.stages.values():
                average_statistics(stage, training.mesh.dp)
        self._report_pipeline()
        self._end_step(totals, totals.loss, step_metrics(training, totals, rate, Timing(watch.seconds, waited)))
        if of_objective is not None:
            self._looks -= 1
            of_objective.check()
            check_learns_nothing(training.objective, self.parameters)
            self._check_held()
        return totals

    def _update(self, loss: torch.Tensor, rate_share: float) -> StepReduction:
        """Agree on loss and gradient norm over the mesh, clip, and let the optimizer step."""
        self.training.tied.sum_gradients()
        self.training.updater.drop_frozen()
        gradients = present(self.parameters)
        timeline = self.training.engine.timeline
        load = timeline.load() if timeline else NO_LOAD
        norm = squared_norm(present(self.counted), self.stage_ranks, self.device)
        reduction = self._reduce(loss / self.training.mesh.tp.size, norm, load)
        if self.spec.optimizer.clip_norm is not None:
            clip_(gradients, reduction.grad_norm, self.spec.optimizer.clip_norm)
        with explained_overflow(self.step + 1, self.spec.optimizer.lr * rate_share):
            self.training.updater.step(rate_share)
        return reduction

    def _report_pipeline(self) -> None:
        """Report the pipeline's work in the last step, for some of the steps."""
        engine, report = self.training.engine, self.context.report
        if not self.reported_undivided and (layers := engine.undivided_backwards()):
            schedule = self.spec.pipeline.schedule
            report.log(
                f"{schedule}: {layers} layers of rank {self.context.rank} compute the gradients of weights and inputs "
                "together (compiled and float8 layers cannot be split), so the bubble is larger than planned"
            )
        self.reported_undivided = True
        if engine.timeline is not None and (self.step < _TIMELINES_FIRST or self.step % SPANS_EVERY == 0):
            for span in engine.timeline.spans(self.step + 1):
                report.span(*span)

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        """Run eagerly in a phase that the gate does not cover, although the other one is compiled."""
        if self.training.compile_modes and phase not in self.training.compile_modes:
            with set_stance("force_eager"):
                yield
        else:
            yield


def evaluate(training: Training) -> dict[str, float]:
    """Return ``eval_loss`` with ``eval_accuracy`` (classes) or ``eval_perplexity`` (tokens); all ranks call this and
    agree.
    """
    totals = torch.zeros(training.objective.measures, dtype=torch.float64, device=training.device)
    samples = len(training.dataset.test)
    if (most := training.spec.evaluate.samples) is not None:
        samples = min(samples, most)
    dp = training.mesh.dp
    for number, (rows, valid) in enumerate(batches(samples, training.order.global_batch, dp.rank, dp.size)):
        # What a source draws is alike in every evaluation, and on all stages of a pipeline.
        with seeded(training.spec.seed, "test samples", number, dp.rank):
            batch = training.dataset.test.take(rows).to(training.device)
        training.boundary.step_boundary()
        totals += training.engine.evaluate(batch, valid)
    totals /= training.mesh.tp.size  # ranks of a tensor-parallel group have computed the same
    if dist.is_initialized():
        dist.all_reduce(totals)
    return training.objective.summary(totals, samples)


def batches(samples: int, global_batch: int, rank: int, ranks: int) -> list[tuple[torch.Tensor, int]]:
    """Return the row indices of each batch for data-parallel ``rank``, and how many of them, from the first, count.

    Every rank gets the same number of batches, all of one size (the last padded), so that collectives stay
    paired and no remainder needs a compilation of its own.
    """
    share = global_batch // ranks
    starts = range(rank * share, -(-samples // global_batch) * global_batch, global_batch)
    return [
        (torch.arange(start, start + share).clamp(max=samples - 1), min(max(samples - start, 0), share))
        for start in starts
    ]
