"""Runs the loop of a program's training, which the program itself steps."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from service.jobs.runtime import Stopwatch
from service.jobs.spec.train import TrainSpec
from service.models.program import Step, Steps
from service.parallel.distributed import peak_memory_gib
from service.training.base_loop import BaseLoop
from service.training.gradients import check_weights
from service.training.journal import Journal, layout
from service.training.programs.setup import FIRST, Forms, PreparedProgram, ProgramError, blamed, takes
from service.training.programs.state import ProgramCheckpoints
from service.training.publishing import publish_weights
from service.training.step_totals import RankShare, StepReduction, StepTotals, held_gib

_LOSS, _EVALUATION = "loss", "eval_"


class ProgramLoop(BaseLoop):
    """Runs a prepared training of a program. Its errors are :class:`ProgramError`, with the program and the step."""

    go_on = (
        "change what makes it diverge, in the fields of program, and go on from the last checkpoint by a new job with "
        "resume: {job: ID}"
    )

    def __init__(self, spec: TrainSpec, training: PreparedProgram) -> None:
        journal = Journal(spec, training.context)
        checkpoints = ProgramCheckpoints(spec, training, journal.saved)
        super().__init__(spec, training.context, training.device, checkpoints, journal)
        self.training = training
        self.resumes = takes(training.program.train, FIRST)
        self._steps: Steps | None = None
        self._forms = Forms(training.config, training.program.period)
        self._held = ""
        """The memory that was in use after the first step of this attempt."""

    def begin(self) -> None:
        self.journal.begin(
            self.step, [f"program: {self.training.described}", f"layout: {layout(self.spec, self.device)}"]
        )
        if not self.resumes and self.context.rank == 0:
            self.context.report.log(f"it cannot go on from a step, since its train() takes no {FIRST}: no checkpoints")

    def advance(self) -> StepTotals:
        training, watch, number = self.training, Stopwatch(), self.step + 1
        steps = self._begun()
        before, eager = training.boundary.step, training.calls.eager
        with (
            self._step_span("step"),
            blamed(training.config, f"step {number}", self._growth),
            training.calls.phase("train"),
        ):
            training.seed("step", self.step)
            step = next(steps)
        if training.boundary.step == before:
            raise self._error("it does not begin with boundary.step_boundary()")
        losses = self._losses(step)
        self._forms.check(step, number)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = sum((value.detach().double().reshape(()).to(self.device) for value in losses.values()), zero)
        totals = self._reduce(total).read(number)
        if totals.unsaved:
            self.checkpoints.saver.wait()
        metrics = {name: value.item() for name, value in losses.items()}
        metrics = {_LOSS: total.item(), **metrics, "step_ms": watch.seconds * 1e3, "memory_gib": totals.memory_gib}
        if training.compile_modes:
            metrics["eager_calls"] = training.calls.eager - eager
        self._look_at_first(number)
        self._end_step(totals, metrics[_LOSS], metrics)
        return totals

    def save(self) -> None:
        if self.training.parts.members() and (self.resumes or self.step == self.spec.steps):
            super().save()

    def check_state(self) -> None:
        values = self.training.parts.members().values()
        check_weights([value for value in values if isinstance(value, nn.Parameter)], self.step, self.device)

    def measure(self) -> dict[str, float]:
        training = self.training
        evaluate = getattr(training.program, "evaluate", None)
        if evaluate is None:
            return {}
        training.seed("evaluation", self.step)
        parts = [part for module in training.parts.modules.values() for part in module.modules()]
        were = [part.training for part in parts]
        with (
            blamed(training.config, f"the evaluation after step {self.step}", self._growth),
            training.calls.phase("inference"),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            found: Mapping[str, Any] = evaluate(training.parts, training.boundary)
            measured = {f"{_EVALUATION}{name.removeprefix(_EVALUATION)}": float(value) for name, value in found.items()}
        for part, was in zip(parts, were, strict=True):
            part.training = was
        return measured

    def publish(self) -> None:
        if self.training.parts.members():
            about = {"program": self.training.config.model_dump(mode="json"), "origin": self.training.origin}
            publish_weights(self.context, self.step, about)

    def facts(self) -> dict[str, Any]:
        return self.training.facts()

    def _begun(self) -> Steps:
        """Return the program's steps, begun after those that are done."""
        if self._steps is None:
            training = self.training
            training.boundary.step = self.step - 1  # the number of a step that has not begun
            done = {FIRST: self.step} if self.resumes else {}
            self._steps = Steps(training.program.train(training.parts, training.boundary, **done), "train")
        return self._steps

    def _losses(self, step: Step) -> dict[str, Tensor]:
        if not step.losses and self.context.rank == 0:
            raise self._error("it yields no loss; expected Step(losses={name: a tensor of one number})")
        for name, value in step.losses.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise self._error(f"its loss {name!r} is of {got}; expected a tensor of one number")
        return dict(step.losses)

    def _reduce(self, loss: Tensor) -> StepReduction:
        use = self.meter.latest
        return StepReduction(
            RankShare(
                loss=loss,
                squared_norm=torch.zeros((), dtype=torch.float64, device=self.device),
                stop=self.context.should_stop(),
                unsaved=self.checkpoints.saver.has_failed,
                memory_gib=peak_memory_gib(self.device),
                device_busy=use.busy,
                held_gib=use.held_gib,
                power_w=use.power_w,
            )
        )

    def _look_at_first(self, number: int) -> None:
        if not self._held:
            self._held = f"after step {number}: {held_gib(self.device):.2f} GiB, "
            self.checkpoints.about()  # whatever a checkpoint would lose is refused here, and not at its time

    def _growth(self) -> str:
        """Say how much more memory is in use than after the first step, and of which tensors there are most."""
        alive = Counter((tuple(each.shape), each.dtype) for each in gc.get_objects() if type(each) is Tensor)
        most = [f"; {count:,} tensors of shape {shape}, {dtype}" for (shape, dtype), count in alive.most_common(1)]
        return f" (in use {self._held}now: {held_gib(self.device):.2f} GiB{''.join(most)})"

    def _error(self, what: str) -> ProgramError:
        return ProgramError(f"program {self.training.config.name!r}, step {self.step + 1}: {what}")
