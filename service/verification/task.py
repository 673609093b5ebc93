"""Defines everything that a rank needs to verify, made from a specification and checked before anything is bounded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.memory import GIB, MemoryBudget, MemoryShortageError
from service.bounds.methods import (
    ALPHA_CROWN,
    ALPHA_CROWN_FIXED,
    BETA_CROWN,
    CROWN,
    CROWN_IBP,
    IBP,
    BoundOptions,
    Method,
)
from service.bounds.optimise import Ascent, Gains
from service.jobs.spec.verify import VerifySpec
from service.parallel.mesh import Mesh
from service.verification.bab.search_group import SINGLE_RANK, SearchGroup
from service.verification.engine import PLAIN, RIGOROUS, Arithmetic, BoundingEngine
from service.verification.properties import Property
from service.verification.results import NonlinearLayer

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running
    from service.bounds.operators.conversion import Array

FLOATS_PER_VALUE = 8
"""Numbers held for each value of an instance: its bounds, the lines of its relaxation, and temporary values."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """A property's instances on this rank of a mesh, whatever models they are about."""

    spec: VerifySpec
    mesh: Mesh
    device: torch.device
    asked: Property

    @cached_property
    def search_group(self) -> SearchGroup:
        """Return the data-parallel ranks that search together: all of them if there are fewer instances than ranks."""
        return (
            SearchGroup(self.mesh.dp) if self.spec.searches() and self.asked.count < self.mesh.dp.size else SINGLE_RANK
        )

    @property
    def groups(self) -> int:
        """Return the number of groups of ranks with their own instances."""
        return self.mesh.dp.size // self.search_group.axis.size

    @property
    def own(self) -> list[int]:
        """Return the instances of this rank, of all models: every ``groups``-th one."""
        return list(range(self.mesh.dp.rank % self.groups, self.asked.count, self.groups))

    @property
    def method_label(self) -> str:
        """Return the method's name in rows and the result."""
        return method_of(self.spec).label + arithmetic_of(self.spec).note

    @property
    def memory(self) -> MemoryBudget:
        """Return the memory that the job may take on each device."""
        return memory_of(self.spec)

    @property
    def leads(self) -> bool:
        """Return whether this rank reports for all ranks that bound the same instances."""
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0 and self.search_group.is_first


@dataclass(frozen=True)
class Outside:
    """The user's own file: ``run`` gives all outputs for one flat instance by onnxruntime, side by side in float64.

    All ranks that have the model together run the same instance. ``content`` reads the file.
    """

    run: Callable[[Array], Array]
    content: Callable[[], bytes]


@dataclass(frozen=True, eq=False)
class Task(Assignment):
    """A property of a model, on this rank of a mesh.

    ``module`` is checked for counterexamples, ``engine`` bounds it; a model from ONNX has a ``runtime``, and is
    ``outside``, too, as the user has it. ``layers`` are those of all stages. ``part`` are the instances about this
    model, if there are several models. ``notes`` are lines for the log, ``precision`` is the note of rows about a model
    in half precision, ``gains`` records the gain of optimisation, and ``visited`` the inputs ``(n, features)`` of a
    search that has verified an instance.
    """

    module: nn.Module
    engine: BoundingEngine
    layers: Sequence[NonlinearLayer]
    runtime: Running | None = None
    outside: Outside | None = None
    part: frozenset[int] | None = None
    notes: tuple[str, ...] = ()
    precision: str | None = None
    gains: Gains = field(default_factory=Gains)
    visited: dict[int, Tensor] = field(default_factory=dict)

    def is_about(self, instance: int) -> bool:
        """Return whether the instance is about this task's model."""
        return self.part is None or instance in self.part

    @property
    def own_type(self) -> torch.dtype:
        """Return the type in which the model computes, as a file has its inputs."""
        is_double = self.runtime is not None and np.dtype(self.runtime.dtype) == np.float64
        return torch.float64 if is_double else torch.float32

    @property
    def is_alone(self) -> bool:
        """Return whether no other rank takes part in bounds and verdicts of the same instances."""
        return self.engine.is_alone and self.search_group.axis.size == 1

    @property
    def like(self) -> Tensor:
        """Return an empty tensor of the dtype and on the device in which bounds are computed."""
        return torch.empty(0, dtype=self.engine.arithmetic.dtype, device=self.device)

    def anywhere(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank that bounds the same instances; all of them call it."""
        return self.engine.anywhere(self.search_group.anywhere(flag, self.device))

    @property
    def options(self) -> BoundOptions:
        ascent = Ascent(iterations=self.spec.budget.iterations)
        return BoundOptions(ascent=ascent, memory=self.memory, gains=self.gains)

    def survives(self, error: Exception) -> bool:
        """Return whether a search can go on after this error: memory ran out, and no other rank waits for this one."""
        is_single = self.search_group.axis.size == 1
        return self.engine.survives(error) and (is_single or isinstance(error, MemoryShortageError))

    @property
    def _at_once(self) -> int:
        """Return the number of instances in a batch; all ranks that bound them ask."""
        each = FLOATS_PER_VALUE * sum(node.size for node in self.engine.network.graph.nodes) * self.like.element_size()
        with suppress(MemoryShortageError):
            return self.memory.plan(self.device, each, self.spec.budget.batch, share=2, least=self.engine.least)
        return 1

    def batches(self, without: Container[int]) -> Iterator[list[int]]:
        left = [instance for instance in self.own if self.is_about(instance) and instance not in without]
        size = self._at_once
        return (left[start : start + size] for start in range(0, len(left), size))


def method_of(spec: VerifySpec) -> Method:
    """Return the method that bounds instances, and the subproblems of a search for their verdicts."""
    return ALPHA_CROWN_FIXED if spec.intermediate == "fixed" else _METHODS[spec.method]


def arithmetic_of(spec: VerifySpec) -> Arithmetic:
    """Return the arithmetic in which a job bounds its models."""
    return RIGOROUS if spec.rigorous else PLAIN


_METHODS = {method.name: method for method in (IBP, CROWN_IBP, CROWN, ALPHA_CROWN, BETA_CROWN)}


def memory_of(spec: VerifySpec) -> MemoryBudget:
    """Return the memory that a job may take on each device."""
    limit = spec.budget.memory_gib
    return MemoryBudget() if limit is None else MemoryBudget(int(limit * GIB))


@dataclass(frozen=True)
class RefusedModel:
    """Instances whose model cannot be bounded, and why; ``asked`` is their property if it is only too large, and
    ``fault`` the service's own error, if that is the reason.
    """

    part: frozenset[int]
    reason: str
    asked: Property | None = None
    fault: Exception | None = None
