"""Defines the program of a built-in or installed model family: one model, batches, a loss, plain gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from service.models.program import Parts, Step
from service.parallel.boundary import Shapes, StepBoundary
from service.parallel.containers import named_tensors, tensors_in
from service.parallel.fsdp import PartlyUsed, is_static, synchronize_gradients

LEARNING_RATE = 1e-2
"""Plain gradient descent: its updates are linear in the gradients, so they show errors without magnifying them."""
MODEL = "model"
_PARTLY_USED = "partly_used"
"""The attribute of a module that has what settles its steps: it is made once, and steps may begin anew."""


@dataclass(frozen=True)
class SampleBatch:
    """Positional inputs of one forward, and the targets with which the loss compares its output."""

    inputs: tuple[Tensor, ...]
    targets: Tensor

    @property
    def shapes(self) -> Shapes:
        """Return the shapes of the inputs."""
        return tuple(tuple(value.shape) for value in self.inputs)

    def fresh(self, dtype: torch.dtype = torch.float32) -> SampleBatch:
        """Return a copy that the program may overwrite; floating-point tensors as ``dtype``."""
        return SampleBatch(tuple(_copy(value, dtype) for value in self.inputs), _copy(self.targets, dtype))

    def chunks(self, count: int) -> Iterator[SampleBatch]:
        """Yield ``count`` equal parts in order; views of this batch."""
        inputs = zip(*(value.chunk(count) for value in self.inputs), strict=True)
        yield from (SampleBatch(*part) for part in zip(inputs, self.targets.chunk(count), strict=True))


def _copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to(dtype if value.is_floating_point() else value.dtype, copy=True)


@dataclass(frozen=True)
class BatchedProgram:
    """A program of any module over ``batches``, visited in turn: it knows their device and period, and trains by plain
    gradient descent.
    """

    module: Callable[..., nn.Module]
    batches: tuple[SampleBatch, ...]
    loss: Callable[[Tensor, Tensor], Tensor]

    @property
    def device(self) -> torch.device:
        return self.batches[0].inputs[0].device

    @property
    def period(self) -> int:
        """Return the longest way from a batch to the next one of its shape: any so many in a row have every shape."""
        places: dict[Shapes, list[int]] = {}
        for index, batch in enumerate(self.batches):
            places.setdefault(batch.shapes, []).append(index)
        turns = ([*own, own[0] + len(self.batches)] for own in places.values())
        return max(then - before for turn in turns for before, then in pairwise(turn))

    def _settle(self, modules: Iterable[nn.Module], group: str) -> None:
        """End the backwards of a step as a job does, where ranks of the data-parallel ``group`` may reach different
        parameters.
        """
        for module in modules:
            if group and not is_static(module):
                getattr(module, _PARTLY_USED).settle()

    def _parts(self, modules: Mapping[str, nn.Module], dtype: torch.dtype, group: str) -> Parts:
        """Return ``modules``, all to be compiled, with their optimizer unless nothing in them trains."""
        for module in modules.values():
            if group and not is_static(module):
                setattr(module, _PARTLY_USED, PartlyUsed(module, group))
        trainable = [value for module in modules.values() for value in module.parameters() if value.requires_grad]
        optimizers = (torch.optim.SGD(trainable, lr=LEARNING_RATE, foreach=False),) if trainable else ()
        return Parts(modules, tuple(modules), optimizers, dtype)


@dataclass(frozen=True)
class ModelProgram(BatchedProgram):
    """A model as a job runs it; a ``service.models.program.Program``.

    ``module(dtype)`` gives a new module on its device, each time with the same float32 weights, converted to ``dtype``.
    Each step takes the next of ``batches``, in ``micro_batches`` equal parts, whose gradients add up to that of the
    whole. ``loss(outputs, targets)`` is a scalar, the mean over samples. ``before_backward(model, is_last)`` is called
    before each forward of a training step. FSDP shards it over the ranks of ``group``, if there is one.
    """

    module: Callable[[torch.dtype], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    micro_batches: int = 1
    before_backward: Callable[[nn.Module, bool], None] = synchronize_gradients
    group: str = ""

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("a program needs at least one batch")
        if not callable(self.loss):
            raise TypeError(f"loss={self.loss!r}: a program needs a function loss(outputs, targets)")

    def build(self, dtype: torch.dtype) -> Parts:
        return self._parts({MODEL: self.module(dtype)}, dtype, self.group)

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        for batch in cycle(self.batches):  # in the modes in which the module is built, as in a job
            yield self._train_step(parts, boundary, batch)

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        parts.modules[MODEL].eval()
        for batch in cycle(self.batches):
            yield self._inference_step(parts, boundary, batch)

    def _train_step(self, parts: Parts, boundary: StepBoundary, original: SampleBatch) -> Step:
        boundary.step_boundary()
        model, batch = parts.modules[MODEL], original.fresh(parts.dtype)
        for optimizer in parts.optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses, outputs = [], []
        for index, micro in enumerate(batch.chunks(self.micro_batches)):
            self.before_backward(model, index == self.micro_batches - 1)
            output = boundary.boundary_call(model, *micro.inputs)
            loss = self.loss(_first_tensor(output), micro.targets) / self.micro_batches
            if loss.requires_grad:
                torch.autograd.backward(loss)
            losses.append(loss.detach())
            outputs.append(output)
        self._settle([model], self.group)
        for optimizer in parts.optimizers:
            optimizer.step()
        return Step({"loss": torch.stack(losses).sum()}, self._detach_outputs(outputs), _inputs(original, batch))

    def _inference_step(self, parts: Parts, boundary: StepBoundary, original: SampleBatch) -> Step:
        boundary.step_boundary()
        model, batch = parts.modules[MODEL], original.fresh(parts.dtype)
        with torch.no_grad():
            outputs = [boundary.boundary_call(model, *micro.inputs) for micro in batch.chunks(self.micro_batches)]
        return Step(outputs=self._detach_outputs(outputs), inputs=_inputs(original, batch))

    def _detach_outputs(self, outputs: list[Any]) -> dict[str, Tensor]:
        if self.micro_batches == 1:
            return detach("output", outputs[0])
        return dict(pair for index, output in enumerate(outputs) for pair in detach(f"output {index}", output).items())


def _first_tensor(outputs: Any) -> Tensor:
    """Return the first tensor, from which the loss is taken. Raises ``TypeError`` without one."""
    first = next(tensors_in(outputs), None)
    if first is None:
        raise TypeError(f"the module returned {type(outputs).__name__} without a tensor in it; a loss needs one")
    return first


def detach(name: str, outputs: Any) -> dict[str, Tensor]:
    """Return the tensors in nested ``outputs`` under dotted names, cut off from their graphs."""
    return {key: value.detach() for key, value in named_tensors(name, outputs)}


def _inputs(original: SampleBatch, left: SampleBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each input before and after the step."""
    pairs = zip(original.inputs, left.inputs, strict=True)
    return {f"input {index}": pair for index, pair in enumerate(pairs)}
