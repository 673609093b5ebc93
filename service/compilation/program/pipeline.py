"""Defines the program of a model that is cut into pipeline stages: a job's schedule over this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn

from service.compilation.program.model import BatchedProgram, SampleBatch
from service.jobs.spec.compile import Phase
from service.models.program import Parts, Step
from service.parallel.boundary import StepBoundary
from service.parallel.boundary.step import is_compiled
from service.parallel.mesh import Mesh
from service.parallel.pipeline.runtime import PipelineRuntime, Work
from service.parallel.pipeline.stage import Part
from service.parallel.pipeline.transport import Channels
from service.schedules import forward_only
from service.schedules.schedule import Schedule


@dataclass(frozen=True)
class PipelineProgram(BatchedProgram):
    """A ``service.models.program.Program`` over the stages of this rank, compiled one by one.

    The rank of the last stage has the losses and outputs of each step.
    """

    module: Callable[[torch.dtype, Part], nn.Module]
    """Makes a new stage of a dtype."""
    mesh: Mesh
    schedule: Schedule
    """What each step runs over one of ``batches``; in inference the same micro-batches forward only."""
    channels: Channels
    entered: dict[str, Tensor] = field(default_factory=dict)
    """An input of each stage, from its last uncompiled run in float32."""

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(f"loss={self.loss!r}: a pipeline needs a function loss(output, targets)")

    def build(self, dtype: torch.dtype) -> Parts:
        owners = self.schedule.owners
        own = [stage for stage, owner in enumerate(owners) if owner == self.mesh.pp.rank]
        made = {f"stage{stage}": self.module(dtype, Part(stage, len(owners))) for stage in own}
        return self._parts(made, dtype, self.mesh.dp.group)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        runtime = self._runtime(parts, boundary)
        for batch in cycle(self.batches):  # in the modes in which stages are built, as in a job
            yield self._train_step(parts, boundary, runtime, batch)

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        runtime = self._runtime(parts, boundary)
        schedule = forward_only(self.schedule.owners, self.schedule.micro_batches)
        for module in parts.modules.values():
            module.eval()
        for batch in cycle(self.batches):
            boundary.step_boundary()
            with torch.no_grad():
                outputs = runtime.run(schedule, self._work(batch, parts.dtype, lambda output, target: output))
            yield Step(outputs={f"output {index}": value for index, value in enumerate(outputs)})

    def alone(self, parts: Parts, boundary: StepBoundary, phase: Phase) -> None:
        boundary.step_boundary()
        for name, module in parts.modules.items():
            if phase == "inference":
                module.eval()
            given = self.entered[name].clone()
            with torch.set_grad_enabled(phase == "train"):
                given.requires_grad_(phase == "train" and given.is_floating_point())
                try:
                    output = boundary.boundary_call(module, given)
                    if output.requires_grad:
                        torch.autograd.backward(output.float().square().mean())
                except Exception as error:
                    raise RuntimeError(f"{name}: {error}") from error

    def _train_step(self, parts: Parts, boundary: StepBoundary, runtime: PipelineRuntime, batch: SampleBatch) -> Step:
        boundary.step_boundary()
        for optimizer in parts.optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses = runtime.run(self.schedule, self._work(batch, parts.dtype, self.loss))
        self._settle(parts.modules.values(), self.mesh.dp.group)
        for optimizer in parts.optimizers:
            optimizer.step()
        return Step({"loss": torch.stack([loss.detach() for loss in losses]).mean()} if losses else {})

    def _work(self, batch: SampleBatch, dtype: torch.dtype, objective: Callable[[Tensor, Tensor], Tensor]) -> Work:
        micro = list(batch.fresh(dtype).chunks(self.schedule.micro_batches))
        inputs, targets = [part.inputs[0] for part in micro], [part.targets for part in micro]
        return Work(objective, inputs, targets, key=batch.shapes)

    def _runtime(self, parts: Parts, boundary: StepBoundary) -> PipelineRuntime:
        stages = {int(name.removeprefix("stage")): module for name, module in parts.modules.items()}
        for name, module in parts.modules.items():
            if parts.dtype is torch.float32 and not is_compiled(module):
                module.register_forward_pre_hook(partial(self._note, name))
        return PipelineRuntime(
            stages,
            self.mesh,
            device=self.device,
            owners=self.schedule.owners,
            channels=self.channels,
            boundary=boundary,
        )

    def _note(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.entered[name] = inputs[0].detach()
