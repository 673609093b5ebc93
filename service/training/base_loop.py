"""Defines the loop that every training shares: steps, metrics, checkpoints and evaluations, of a model or a program."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from service.jobs.plugins import Evaluation
from service.jobs.runtime import RefusedError, RunContext, Stopwatch
from service.jobs.spec.train import TrainSpec
from service.parallel import checkpoint
from service.parallel.distributed import from_first_rank, peak_memory_gib
from service.training.checkpoints import Checkpoints, evaluations_of
from service.training.gradients import NonFiniteError
from service.training.history import History
from service.training.journal import Journal
from service.training.step_totals import DeviceMeter, RankShare, StepReduction, StepTotals, metrics_of
from service.training.timeline import NO_LOAD, Load

SPANS_FIRST, SPANS_EVERY = 20, 50
"""Spans of single steps are reported for the first few and then for a sample: a timeline needs no more."""
START_AGAIN = "lower the learning rate or correct the data, in a new job: this one has no checkpoint to go on from"


class BaseLoop(ABC):
    """Runs a prepared training from its newest checkpoint on. ``step`` counts finished steps; ``go_on`` says what can
    be done from a checkpoint after numbers that are not finite.

    ``evaluations`` are those on which schedule or end depend, with the metrics that they follow; checkpoints have them.
    """

    go_on: ClassVar[str]

    def __init__(self, spec: TrainSpec, context: RunContext, device: torch.device, checkpoints: Checkpoints) -> None:
        self.spec, self.context, self.device, self.checkpoints = spec, context, device, checkpoints
        self.journal = Journal(spec, context)
        self.step = 0
        self.meter = DeviceMeter(device)
        self.loss = float("nan")
        self.evaluations: list[Evaluation] = []
        self.evaluated: Evaluation | None = None
        self.told_to_end: str | None = None
        self.watch = Stopwatch()
        self.history = History(context.paths.artifacts / "metrics.parquet", 0)

    @abstractmethod
    def begin(self) -> None:
        """Log what is trained, from this step on."""

    @abstractmethod
    def publish(self) -> None:
        """Publish the finished training and its checkpoints, on the first rank and without a collective."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the job's result says beside losses and steps."""

    @abstractmethod
    def advance(self) -> StepTotals:
        """Run one step and return its totals; ends with :meth:`_end_step`."""

    @abstractmethod
    def check_state(self) -> None:
        """Raise an error for a state from which no run could continue, such as :class:`NonFiniteError`."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Return the metrics of an evaluation after this step, if there is one; all ranks call it and agree."""

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
            advice = START_AGAIN if self.checkpoints.saved_step is None else self.go_on
            raise NonFiniteError(f"{error}; {advice}") from error

    def train(self) -> bool:
        """Step until the spec's number of steps or the end that it asks for; False when the attempt was asked to stop
        before that.
        """
        self._make_up_evaluation()
        while self.step < self.spec.steps and self.early_end() is None:
            totals = self.advance()
            if totals.stop and self.step < self.spec.steps:
                return False
            if totals.end:
                self.told_to_end = self.context.ends_early() or "stopped early by the sweep"
            if _due(self.step, self.spec.checkpoint.every):
                self.save()
            if self._evaluation_due():
                self.evaluate()
        self.context.report.progress(self.step, self.step, "steps")  # also of a training that ends before its last
        return True

    def early_end(self) -> str | None:
        """Return why the training ends before its last step; ``None`` if it goes on."""
        if self.step == self.spec.steps:
            return None
        if self.told_to_end is not None:
            return self.told_to_end
        return None if self.spec.stop is None else self.spec.stop.reason(self.evaluations)

    def is_told_to_end(self) -> bool:
        """Return whether this rank says that the training ends: the first one does, which reports why."""
        return self.context.rank == 0 and self.context.ends_early() is not None

    def save(self) -> None:
        """Take a checkpoint of this step, unless there is one; the metrics so far go with it.

        Its write may end later: the span ``checkpoint`` is how long training stood still for it. Raises
        :class:`NonFiniteError` for weights from which no run could continue.
        """
        if self.checkpoints.saved_step == self.step:
            return
        self.check_state()
        with self._span("checkpoint", step=self.step):
            self.checkpoints.save(self.step, self.loss, self.evaluations)
            checkpoint.on_first_rank(self.history.write, f"write {self.history.path.name}")

    def evaluation(self) -> Mapping[str, float]:
        """Return the metrics of an evaluation at this step, once it is reported."""
        if self.evaluated is None or self.evaluated.step != self.step:
            self.evaluate()
        assert self.evaluated is not None
        return self.evaluated.metrics

    def evaluate(self) -> None:
        """Evaluate, and report the metrics at this step. Raises :class:`NonFiniteError`."""
        with self._span("evaluate", step=self.step):
            metrics = self.measure()
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"{name} is {value} in the evaluation after step {self.step}: look first at the test split for "
                    "values that are not finite"
                )
        if metrics:
            self._report(metrics)
            self.journal.evaluated(self.step, metrics)
        self.evaluated = Evaluation(self.step, metrics)
        self._follow(metrics)

    def _follow(self, metrics: Mapping[str, float]) -> None:
        """Keep what schedule and end follow of an evaluation."""
        if lacking := [name for name in self.spec.follows if name not in metrics]:
            raise RefusedError(
                f"schedule or stop follows {lacking[0]}, which the evaluations do not report; "
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
        if from_first_rank(not self.history.has_evaluation(self.step)) or followed:
            self.evaluate()

    def _evaluation_due(self) -> bool:
        return _due(self.step, self.spec.evaluate.every) and self.step < self.spec.steps

    def _reduce(self, loss: Tensor, squared_norm: Tensor, load: Load = NO_LOAD) -> StepReduction:
        """Add up this rank's share of a step's totals with those of all others."""
        use = self.meter.latest
        share = RankShare(
            loss=loss,
            squared_norm=squared_norm,
            stop=self.context.should_stop(),
            end=self.is_told_to_end(),
            unsaved=self.checkpoints.saver.has_failed,
            busy=load.busy,
            window=load.window,
            memory_gib=peak_memory_gib(self.device),
            device_busy=use.busy,
            held_gib=use.held_gib,
            power_w=use.power_w,
        )
        return StepReduction(share)

    def _end_step(self, totals: StepTotals, loss: float, metrics: Mapping[str, float]) -> None:
        """Count a step, and report its metrics, the use of devices, and the progress. Raises ``CheckpointError`` if a
        checkpoint could not be written.
        """
        if totals.unsaved:
            self.checkpoints.saver.wait()
        self.step, self.loss = self.step + 1, loss
        self._report(metrics)
        if self.meter.refresh() and self.context.rank == 0 and any(use.held_gib for use in totals.devices):
            self.context.report.metric(self.step, metrics_of(totals.devices))
        self.context.report.progress(self.step, self.spec.steps, "steps")

    def _report(self, metrics: Mapping[str, float]) -> None:
        """Report the metrics from the first rank: they are the same everywhere."""
        if self.context.rank == 0:
            self.history.add(self.step, metrics)
            self.context.report.metric(self.step, metrics)

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
