"""Runs the loop of a program's training, which the program itself steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from service.jobs.runtime import Stopwatch
from service.jobs.spec.train import TrainSpec
from service.models.modes import modes_kept
from service.models.program import Step
from service.parallel.distributed import from_first_rank
from service.training.base_loop import BaseLoop
from service.training.gradients import check_weights
from service.training.journal import layout
from service.training.programs.setup import FIRST, PreparedProgram, takes
from service.training.programs.state import ProgramCheckpoints
from service.training.programs.steps import ProgramSteps
from service.training.publishing import publish_weights
from service.training.step_totals import StepTotals

_LOSS, _EVALUATION = "loss", "eval_"


class ProgramLoop(BaseLoop):
    """Runs a prepared training of a program. Its errors name the program and the step."""

    go_on = (
        "change what makes it diverge, in the fields of program, and go on from the last checkpoint by a new job with "
        "resume: {job: ID}"
    )

    def __init__(self, spec: TrainSpec, training: PreparedProgram) -> None:
        super().__init__(spec, training.context, training.device, ProgramCheckpoints(spec, training))
        self.training = training
        self.resumes = takes(training.program.train, FIRST)
        self._steps: ProgramSteps | None = None

    def begin(self) -> None:
        self.journal.begin(
            self.step, [f"program: {self.training.described}", f"layout: {layout(self.spec, self.device)}"]
        )
        if not self.resumes and self.context.rank == 0:
            self.context.report.log(f"it cannot go on from a step, since its train() takes no {FIRST}: no checkpoints")

    def advance(self) -> StepTotals:
        training, watch, eager = self.training, Stopwatch(), self.training.calls.eager
        begins, steps = self._steps is None, self._steps or ProgramSteps(self.training, "train", self.step)
        self._steps = steps
        with self._step_span("step"):
            losses = self._losses(steps.run(self.step))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = sum((value.detach().double().reshape(()).to(self.device) for value in losses.values()), zero)
        totals = self._reduce(total, torch.zeros_like(total)).read(self.step + 1)
        if begins:
            self.checkpoints.about(self.step)  # whatever a checkpoint would lose is refused here, and not at its time
        metrics = {name: value.item() for name, value in losses.items()}
        metrics = {_LOSS: total.item(), **metrics, "step_ms": watch.seconds * 1e3, "memory_gib": totals.memory_gib}
        if training.compile_modes:
            metrics["eager_calls"] = training.calls.eager - eager
        self._end_step(totals, metrics[_LOSS], metrics)
        return totals

    def save(self) -> None:
        if self.training.parts.members() and (
            self.resumes or self.step == self.spec.steps or self.early_end() is not None
        ):
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
        with (
            modes_kept(training.parts.modules.values()),
            training.usage.evaluation(self.step),
            training.blame.of(f"the evaluation after step {self.step}"),
            training.calls.phase("inference"),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            found: Mapping[str, Any] = evaluate(training.parts, training.boundary)
            measured = {f"{_EVALUATION}{name.removeprefix(_EVALUATION)}": float(value) for name, value in found.items()}
        return from_first_rank(measured)  # they are reported, and ranks that follow them end together

    def publish(self) -> None:
        if self.training.parts.members():
            about = {"program": self.training.config.model_dump(mode="json"), "origin": self.training.origin}
            publish_weights(self.context, self.step, about)

    def facts(self) -> dict[str, Any]:
        return self.training.facts()

    def _losses(self, step: Step) -> dict[str, Tensor]:
        blame, doing = self.training.blame, f"train step {self.step + 1}"
        if not step.losses and self.context.rank == 0:
            raise blame.error(doing, "it yields no loss; expected Step(losses={name: a tensor of one number})")
        for name, value in step.losses.items():
            if value.numel() != 1:
                got = tuple(value.shape)
                raise blame.error(doing, f"its loss {name!r} is of shape {got}; expected a tensor of one number")
        return dict(step.losses)
