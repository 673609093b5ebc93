"""One iteration of a phase, as a job runs it: forward, and for training backward and update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from service.compilation.internals.backward import compiled_backwards
from service.compilation.program import Batch, Phase, Program
from service.compilation.rungs import Backend

LEARNING_RATE = 1e-2
"""Plain gradient descent: its updates are linear in the gradients, so they show errors without magnifying them."""


Key = tuple[str, str]


@dataclass(frozen=True)
class Record:
    """What one iteration gave, as CPU copies of local tensors.

    ``tensors`` maps ``(kind, name)``, kinds ``loss, output, input, gradient``, to values; ``missing`` names the
    trainable parameters without a gradient; ``compiled_backward`` counts compiled nodes of the backward.
    """

    tensors: dict[Key, Tensor]
    missing: frozenset[str] = frozenset()
    compiled_backward: int = 0


@dataclass(frozen=True)
class Subject:
    """A module in a phase, ready to run; ``optimizer`` is ``None`` where nothing is updated."""

    module: nn.Module
    program: Program
    optimizer: torch.optim.Optimizer | None
    dtype: torch.dtype

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def batch(self, iteration: int) -> Batch:
        return self.program.batch(iteration).fresh(self.dtype)


def build(
    program: Program, phase: Phase, backend: Backend | None = None, dtype: torch.dtype = torch.float32
) -> Subject:
    """A new module in the phase's mode, compiled with ``backend`` if given, with an optimizer for training."""
    module = program.build(dtype)
    if backend is not None:
        program.attach(module, backend)
    module.train(phase == "train")
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    descends = phase == "train" and bool(trainable)
    optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE, foreach=False) if descends else None
    return Subject(module, program, optimizer, dtype)


def train_step(subject: Subject, batch: Batch) -> None:
    """One bare training step, for timing."""
    if subject.optimizer is not None:
        subject.optimizer.zero_grad(set_to_none=True)
    loss = subject.program.loss(first_tensor(subject.module(*batch.inputs)), batch.targets)
    if loss.requires_grad:
        torch.autograd.backward(loss)
    if subject.optimizer is not None:
        subject.optimizer.step()


def inference_step(subject: Subject, batch: Batch) -> None:
    """One bare inference call, for timing."""
    with torch.no_grad():
        subject.module(*batch.inputs)


def record_train(subject: Subject, batch: Batch) -> Record:
    """One training step, and everything it computed."""
    if subject.optimizer is not None:
        subject.optimizer.zero_grad(set_to_none=True)
    outputs = subject.module(*batch.inputs)
    loss = subject.program.loss(first_tensor(outputs), batch.targets)
    tensors = _results(outputs, batch) | {("loss", "loss"): keep(loss)}
    backwards = compiled_backwards(loss)
    if loss.requires_grad:
        torch.autograd.backward(loss)
    gradients = {name: parameter.grad for name, parameter in subject.trainable.items()}
    tensors |= {("gradient", name): keep(value) for name, value in gradients.items() if value is not None}
    if subject.optimizer is not None:
        subject.optimizer.step()
    return Record(tensors, frozenset(name for name, value in gradients.items() if value is None), backwards)


def record_inference(subject: Subject, batch: Batch) -> Record:
    """One inference call, and everything it computed."""
    with torch.no_grad():
        outputs = subject.module(*batch.inputs)
    return Record(_results(outputs, batch))


STEPS: dict[Phase, Callable[[Subject, Batch], None]] = {"train": train_step, "inference": inference_step}
RECORDS: dict[Phase, Callable[[Subject, Batch], Record]] = {"train": record_train, "inference": record_inference}


def state_of(subject: Subject) -> dict[Key, Tensor]:
    """Copies of the trainable parameters and of the buffers."""
    parameters = {("parameter", name): keep(value) for name, value in subject.trainable.items()}
    return parameters | {("buffer", name): keep(value) for name, value in subject.module.named_buffers()}


def keep(value: Tensor) -> Tensor:
    """A CPU copy of this rank's part of ``value``."""
    to_local = getattr(value, "to_local", None)
    local: Tensor = to_local() if to_local else value
    return local.detach().to("cpu", copy=True)


def first_tensor(outputs: Any) -> Tensor:
    """The tensor that the loss is taken of."""
    found = next((value for _, value in _flatten("output", outputs)), None)
    if found is None:
        raise TypeError(f"the module returned {type(outputs).__name__} without a tensor in it; a loss needs one")
    return found


def _results(outputs: Any, batch: Batch) -> dict[Key, Tensor]:
    found = {("output", name): keep(value) for name, value in _flatten("output", outputs)}
    return found | {("input", f"input {index}"): keep(value) for index, value in enumerate(batch.inputs)}


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in items:
        yield from _flatten(f"{name}.{key}", part)
