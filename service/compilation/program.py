"""What is compile-checked: a module, its inputs and its loss, as a job would run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from service.compilation.rungs import Backend
from service.models.compiled import compile_in_place

Phase = Literal["train", "inference"]


@dataclass(frozen=True)
class Batch:
    """Positional inputs of one forward, and what the loss compares its output with."""

    inputs: tuple[Tensor, ...]
    targets: Tensor

    def fresh(self, dtype: torch.dtype = torch.float32) -> Batch:
        """A copy that the program may overwrite; floating-point tensors as ``dtype``."""
        return Batch(tuple(_copy(value, dtype) for value in self.inputs), _copy(self.targets, dtype))


def _copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to(dtype if value.is_floating_point() else value.dtype, copy=True)


def _attach(module: nn.Module, backend: Backend) -> None:
    compile_in_place(module, backend)


@dataclass(frozen=True)
class Program:
    """A model as a job runs it.

    ``build(dtype)`` gives a new module on its device, each time with the same float32 weights, converted to
    ``dtype``. ``batches`` are visited in turn; their different shapes are the shapes of the job.
    ``loss(outputs, targets)`` is a scalar. ``attach`` compiles a built module in place.
    """

    build: Callable[[torch.dtype], nn.Module]
    batches: tuple[Batch, ...]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    attach: Callable[[nn.Module, Backend], None] = _attach
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("a program needs at least one batch")

    def batch(self, iteration: int) -> Batch:
        return self.batches[iteration % len(self.batches)]

    @property
    def first_pass(self) -> int:
        """Iterations until every input shape has been seen."""
        return max(_first_seen(self.batches).values()) + 1

    @property
    def cycle(self) -> tuple[Batch, ...]:
        """One batch of every input shape."""
        return tuple(self.batches[index] for index in _first_seen(self.batches).values())

    @property
    def device(self) -> torch.device:
        return self.batches[0].inputs[0].device


Shapes = tuple[tuple[int, ...], ...]


def shapes_of(batch: Batch) -> Shapes:
    return tuple(tuple(value.shape) for value in batch.inputs)


def _first_seen(batches: tuple[Batch, ...]) -> dict[Shapes, int]:
    """The first batch of each input shape, by index."""
    seen: dict[Shapes, int] = {}
    for index, batch in enumerate(batches):
        seen.setdefault(shapes_of(batch), index)
    return seen
