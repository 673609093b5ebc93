"""Runs the training loop: learning rate, steps, metrics, checkpoints and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.compiler import set_stance

from service.jobs.plugins import Evaluation
from service.jobs.runtime import RefusedError, Stopwatch
from service.jobs.spec.compile import Phase
from service.models.data import open_feed
from service.models.plain import PlainModel
from service.parallel import checkpoint
from service.parallel.batch_norm import average_statistics
from service.parallel.distributed import peak_memory_gib
from service.training.checkpoints import Checkpoints, evaluations_of
from service.training.gradients import (
    NonFiniteError,
    check_weights,
    clip_,
    explained_overflow,
    present,
    squared_norm,
)
from service.training.history import History
from service.training.journal import Journal, Timing, step_metrics
from service.training.setup import Training
from service.training.step_totals import DeviceMeter, RankShare, StepReduction, StepTotals, metrics_of
from service.training.timeline import NO_LOAD
from service.training.usage import UsageMetrics

SPANS_FIRST, SPANS_EVERY = 20, 50
"""Spans of single steps are reported for the first few and then for a sample: a timeline needs no more."""
_TIMELINES_FIRST = 4
"""The first steps, for which every computation of a pipeline is reported."""
GO_ON = (
    "lower the learning rate and go on from the last checkpoint by a new job with resume: {job: ID}, or correct the "
    "data and start from its weights by model: {job: ID}"
)
START_AGAIN = "lower the learning rate or correct the data, in a new job: this one has no checkpoint to go on from"


class Loop:
    """Runs a prepared training from its newest checkpoint on. ``step`` counts finished optimizer steps.

    ``evaluations`` are those on which schedule or end depend, with the metrics that they follow; checkpoints have them.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.spec, self.context = training.spec, training.context
        self.parameters = [parameter for stage in training.stages.values() for parameter in stage.parameters()]
        copies = set(map(id, training.tied.copies))  # a tied parameter counts once in the norm of the whole model
        self.counted = [parameter for parameter in self.parameters if id(parameter) not in copies]
        self.stage_ranks = training.mesh.spec.world_size // training.mesh.pp.size
        self.step = 0
        self.reported_undivided = False
        self.journal = Journal(training)
        self.meter = DeviceMeter(training.device)
        self.usage = UsageMetrics(training)
        self.checkpoints = Checkpoints(training, self.journal.saved)
        dp, train = training.mesh.dp, training.dataset.train
        self.feed = open_feed(train, training.order, dp.rank, dp.size, training.device)
        self.loss = float("nan")
        self.evaluations: list[Evaluation] = []
        self.evaluated: Evaluation | None = None
        self.watch = Stopwatch()
        self.history = History(self.context.paths.artifacts / "metrics.parquet", 0)

    def resume(self) -> None:
        """Resume from the newest complete checkpoint of the job, else from that of the job that it resumes."""
        saved = self.checkpoints.take_up()
        if saved is None:
            return
        self.step, self.loss = saved.step, saved.meta.get("loss", self.loss)
        self.evaluations = evaluations_of(saved) if self.spec.follows else []
        own, paths, is_first = self.checkpoints.saved_step is not None, self.context.paths, self.context.rank == 0
        kept = self.step if is_first else 0  # only the first rank keeps the metrics
        self.history = History(self.history.path, kept, paths.attempt(0).parent, evaluated=self._evaluation_due())
        if self.history.unreadable:
            self.context.report.log(self.history.unreadable)
        if is_first:
            whose = "" if own or self.spec.resume is None else f" of job {self.spec.resume.job}"
            self.context.report.log(f"resumed from the checkpoint of step {self.step}{whose}")

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Add to a :class:`NonFiniteError` what can be done, by whether the job has a checkpoint."""
        try:
            yield
        except NonFiniteError as error:
            advice = START_AGAIN if self.checkpoints.saved_step is None else GO_ON
            raise NonFiniteError(f"{error}; {advice}") from error

    def train(self) -> bool:
        """Step until the spec's number of steps or the end that it asks for; False when the attempt was asked to stop
        before that.
        """
        self._make_up_evaluation()
        while self.step < self.spec.steps and self.early_end() is None:
            if self.advance().stop and self.step < self.spec.steps:
                return False
            if _due(self.step, self.spec.checkpoint.every):
                self.save()
            if self._evaluation_due():
                self.evaluate()
        self.context.report.progress(self.step, self.step, "steps")  # also of a training that ends before its last
        return True

    def early_end(self) -> str | None:
        """Return why the training ends before its last step; ``None`` if it goes on."""
        stop = self.spec.stop
        return None if stop is None or self.step == self.spec.steps else stop.reason(self.evaluations)

    def save(self) -> None:
        """Take a checkpoint of this step, unless there is one; the metrics so far go with it.

        Its write may end later: the span ``checkpoint`` is how long training stood still for it. Raises
        :class:`NonFiniteError` for weights from which no run could continue.
        """
        if self.checkpoints.saved_step == self.step:
            return
        check_weights(self.parameters, self.step, self.training.device)
        for stage in self.training.stages.values():
            if isinstance(stage, PlainModel):
                stage.check_buffers()
        with self._span("checkpoint", step=self.step):
            self.checkpoints.save(self.step, self.loss, self.evaluations)
            checkpoint.on_first_rank(self.history.write, f"write {self.history.path.name}")

    def evaluation(self) -> Mapping[str, float]:
        """Return the metrics over the test split at this step, once it is reported."""
        if self.evaluated is None or self.evaluated.step != self.step:
            self.evaluate()
        assert self.evaluated is not None
        return self.evaluated.metrics

    def evaluate(self) -> None:
        """Evaluate the test split, and report the metrics at this step. Raises :class:`NonFiniteError`."""
        self.training.seed("evaluation", self.step)
        with self._span("evaluate", step=self.step), self._phase("inference"), self.usage.evaluation(self.step):
            metrics = evaluate(self.training)
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"{name} is {value} in the evaluation after step {self.step}: look first at the test split for "
                    "values that are not finite"
                )
        self._report(metrics)
        self.journal.evaluated(self.step, metrics)
        self.evaluated = Evaluation(self.step, metrics)
        self._follow(metrics)

    def _follow(self, metrics: Mapping[str, float]) -> None:
        """Keep what schedule and end follow of an evaluation."""
        if lacking := [name for name in self.spec.follows if name not in metrics]:
            raise RefusedError(
                f"schedule or stop follows {lacking[0]}, which this objective does not report; "
                f"expected one of {', '.join(metrics)}"
            )
        if self.spec.follows:
            before = [each for each in self.evaluations if each.step < self.step]
            self.evaluations = [*before, Evaluation(self.step, {name: metrics[name] for name in self.spec.follows})]

    def _make_up_evaluation(self) -> None:
        """Evaluate the step that was resumed, if an earlier attempt ended before it had done so, or if the checkpoint,
        which is taken before, lacks an evaluation that is followed.
        """
        if self.step == 0 or not self._evaluation_due():
            return
        followed = bool(self.spec.follows) and not any(each.step == self.step for each in self.evaluations)
        if self.checkpoints.saved_step is None and not followed:
            return
        lacking = torch.tensor(not self.history.has_evaluation(self.step), device=self.training.device)
        if dist.is_initialized():
            dist.broadcast(lacking, src=0)
        if lacking or followed:
            self.evaluate()

    def _evaluation_due(self) -> bool:
        return _due(self.step, self.spec.evaluate.every) and self.step < self.spec.steps

    def advance(self) -> StepTotals:
        """Run one optimizer step and return its metrics."""
        training, watch = self.training, Stopwatch()
        with self._step_span("data"):
            batch = self.feed.batch(self.step)
        waited = watch.seconds
        training.objective.begin(self.step)
        training.seed("step", self.step)
        with self.usage.step(self.step), self._step_span("forward_backward"), self._phase("train"):
            loss = training.engine.forward_backward(batch)
        with self._step_span("optimizer"):
            share = self.spec.schedule.share(self.step, self.spec.steps, self.evaluations)
            rate = self.spec.optimizer.lr * share
            reduction = self._update(loss, share)
            totals = reduction.read(self.step + 1)
        if not training.config.synchronises:
            for stage in training.stages.values():
                average_statistics(stage, training.mesh.dp)
        if totals.unsaved:
            self.checkpoints.saver.wait()
        self._report_pipeline()
        self.step, self.loss = self.step + 1, totals.loss
        self._report(step_metrics(training, totals, rate, Timing(watch.seconds, waited)))
        if self.meter.refresh() and self.context.rank == 0 and any(use.held_gib for use in totals.devices):
            self.context.report.metric(self.step, metrics_of(totals.devices))
        self.context.report.progress(self.step, self.spec.steps, "steps")
        return totals

    def _update(self, loss: torch.Tensor, rate_share: float) -> StepReduction:
        """Agree on loss and gradient norm over the mesh, clip, and let the optimizer step."""
        self.training.tied.sum_gradients()
        self.training.updater.drop_frozen()
        gradients = present(self.parameters)
        timeline, use = self.training.engine.timeline, self.meter.latest
        load = timeline.load() if timeline else NO_LOAD
        share = RankShare(
            loss=loss / self.training.mesh.tp.size,
            squared_norm=squared_norm(present(self.counted), self.stage_ranks, self.training.device),
            stop=self.context.should_stop(),
            unsaved=self.checkpoints.saver.has_failed,
            busy=load.busy,
            window=load.window,
            memory_gib=peak_memory_gib(self.training.device),
            device_busy=use.busy,
            held_gib=use.held_gib,
            power_w=use.power_w,
        )
        reduction = StepReduction(share)
        if self.spec.optimizer.clip_norm is not None:
            clip_(gradients, reduction.grad_norm, self.spec.optimizer.clip_norm)
        with explained_overflow(self.step + 1, self.spec.optimizer.lr * rate_share):
            self.training.updater.step(rate_share)
        return reduction

    def _report(self, metrics: Mapping[str, float]) -> None:
        """Report the metrics from the first rank: they are the same everywhere."""
        if self.context.rank == 0:
            self.history.add(self.step, metrics)
            self.context.report.metric(self.step, metrics)

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
                report.span(span.name, span.start, span.end, span.detail)

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        """Run eagerly in a phase that the gate does not cover, although the other one is compiled."""
        if self.training.compile_modes and phase not in self.training.compile_modes:
            with set_stance("force_eager"):
                yield
        else:
            yield

    @contextmanager
    def _span(self, name: str, **detail: object) -> Iterator[None]:
        watch = Stopwatch()
        yield
        self.context.report.span(name, watch.began, watch.now, detail)

    @contextmanager
    def _step_span(self, name: str) -> Iterator[None]:
        if self.step >= SPANS_FIRST and self.step % SPANS_EVERY:
            yield
        else:
            with self._span(name, step=self.step + 1):
                yield


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def evaluate(training: Training) -> dict[str, float]:
    """Return ``eval_loss`` with ``eval_accuracy`` (classes) or ``eval_perplexity`` (tokens); all ranks call this and
    agree.
    """
    totals = torch.zeros(training.objective.measures, dtype=torch.float64, device=training.device)
    samples = len(training.dataset.test)
    if (most := training.spec.evaluate.samples) is not None:
        samples = min(samples, most)
    for rows, valid in batches(samples, training.order.global_batch, training.mesh.dp.rank, training.mesh.dp.size):
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
