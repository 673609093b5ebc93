"""Defines the program of a compile check: modules, and steps that run them like the real program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from service.jobs.files import DataLayout
from service.parallel.boundary import StepBoundary
from service.parallel.mesh import Mesh


@dataclass(frozen=True)
class Parts:
    """The parts of a program, in one dtype, before anything is compiled."""

    modules: Mapping[str, nn.Module]
    compiled: tuple[str, ...]
    """The modules that the check compiles; the others run as they are."""
    optimizers: tuple[Optimizer, ...] = ()
    """Each of their parameters must get a gradient and move."""
    dtype: torch.dtype = torch.float32
    kept: tuple[str, ...] = ()
    """Modules whose results are meant to outlive their step."""

    def __post_init__(self) -> None:
        strangers = [name for name in self.compiled if name not in self.modules]
        if strangers or not self.compiled:
            named = f"compiled names {strangers[0]!r}" if strangers else "nothing is to be compiled"
            raise ValueError(f"{named}; expected some of the modules {', '.join(self.modules)}")


@dataclass(frozen=True)
class Step:
    """Holds the results of one step, by name, to be compared with the uncompiled program's.

    ``inputs`` has each input that the step may update in place, before and after.
    """

    losses: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Program(Protocol):
    """A program as a job runs it, built anew for every rung. Every rank of a mesh runs it.

    ``train`` and ``inference`` never end: each ``next`` runs one whole step, with its forwards, backwards and updates,
    and yields its results. A second call begins again, over the same parts. A step begins with
    ``boundary.step_boundary()`` and calls modules by ``boundary.boundary_call``, as the real loop does; the harness has
    compiled them in place. Random numbers come from torch's default generators, which are seeded before each step.
    """

    @property
    def device(self) -> torch.device:
        """Return where the program runs."""

    @property
    def period(self) -> int:
        """Steps until every input shape has been seen."""

    def build(self, dtype: torch.dtype) -> Parts:
        """Return new modules, each time with the same float32 weights, converted to ``dtype``.

        Both eager and compiled are judged by float64; a program that cannot run in it raises.
        """

    def train(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        """Yield the training steps."""

    def inference(self, parts: Parts, boundary: StepBoundary) -> Iterator[Step]:
        """Yield the steps of inference: repeated calls."""


@dataclass(frozen=True)
class Site:
    """Tells a program of an installed package where to run: this rank's device, the job's mesh, seed and files."""

    device: torch.device
    mesh: Mesh
    seed: int
    layout: DataLayout


Maker = Callable[[Any, Site], Program]
"""Makes a program from its configuration; ``ProgramKind.maker`` names one."""
