"""Everything that a rank needs to verify, made from a specification and checked before anything is bounded."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.memory import GIB, MemoryBudget, MemoryShortageError, is_out_of_memory
from service.bounds.methods import IBP, METHODS, Bounder, Effort, repeatedly
from service.bounds.network import Network
from service.bounds.optimise import Ascent
from service.bounds.stages import Staged
from service.jobs.spec.verify import VerifySpec
from service.parallel.mesh import Mesh
from service.verification.bab.search_group import SINGLE_RANK, SearchGroup
from service.verification.certify import bounds_by
from service.verification.properties import Property
from service.verification.results import Layer

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running

FLOATS = 8
"""Numbers held for each value of an instance: its bounds, the lines of its relaxation, and what finds them."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """A property's instances on this rank of a mesh, whatever models they are about."""

    spec: VerifySpec
    mesh: Mesh
    device: torch.device
    asked: Property

    @cached_property
    def search_group(self) -> SearchGroup:
        """The data-parallel ranks that search together: all where instances are fewer than they are."""
        return (
            SearchGroup(self.mesh.dp) if self.spec.searches() and self.asked.count < self.mesh.dp.size else SINGLE_RANK
        )

    @property
    def groups(self) -> int:
        """How many groups of ranks have instances of their own."""
        return self.mesh.dp.size // self.search_group.axis.size

    @property
    def own(self) -> list[int]:
        """Instances of this rank, of all models: every ``groups``-th one."""
        return list(range(self.mesh.dp.rank % self.groups, self.asked.count, self.groups))

    @property
    def method_name(self) -> str:
        """The method as rows and the result name it."""
        return self.spec.method + self._fixed + (" (rigorous)" if self.spec.rigorous else "")

    @property
    def _fixed(self) -> str:
        return " (fixed intermediate bounds)" if self.spec.intermediate == "fixed" else ""

    @property
    def memory(self) -> MemoryBudget:
        """The memory that the job may take on each device."""
        return memory_of(self.spec)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that bound the same instances."""
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0 and self.search_group.is_first


@dataclass(frozen=True, eq=False)
class Task(Assignment):
    """A property of a model, on this rank of a mesh.

    A model from ONNX has a ``runtime``. Of a model in stages ``network`` is this rank's, ``layers`` are those of all.
    ``part`` are the instances that are about this model, where there are several. ``notes`` are lines for the log.
    """

    module: nn.Module
    network: Network
    layers: Sequence[Layer]
    runtime: Running | None = None
    staged: Staged | None = None
    part: frozenset[int] | None = None
    notes: tuple[str, ...] = ()

    def is_about(self, instance: int) -> bool:
        """Return whether the instance is about this task's model."""
        return self.part is None or instance in self.part

    @property
    def inside(self) -> str:
        """The name of the method that bounds batches, and the domains of a search."""
        return "crown" if self.spec.method == "beta-crown" else self.spec.method + self._fixed

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and on the device in which bounds are computed."""
        return torch.empty(0, dtype=torch.float64 if self.spec.rigorous else torch.float32, device=self.device)

    def method(self) -> Bounder:
        """Return the method that bounds the whole model, which all stages call; what it caches ends with it."""
        method = METHODS[self.inside].rigorous if self.spec.rigorous else METHODS[self.inside].plain
        return repeatedly(method, self.device) if self.staged is None else self.staged.method(method)

    def enclosed(self, x: Tensor) -> Interval:
        """Bound the outputs ``(outputs,)`` at one input ``(features,)``, rigorous if the job is; all ranks call it."""
        method = IBP.rigorous if self.spec.rigorous else IBP.plain
        return bounds_by(method, self.staged or self.network, Interval.point(x[None].to(self.like)), self.effort)

    def anywhere(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank that bounds the same instances; all of them call it."""
        found = self.network.exchange.largest(int(self.search_group.anywhere(flag, self.device)), self.device)
        return bool(self.of_all_stages(torch.tensor([[found]])).any())

    def of_all_stages(self, values: Tensor) -> Tensor:
        """Gather ``(batch, own)`` numbers of this stage to ``(batch, all)``, on the host."""
        return values.cpu() if self.staged is None else self.staged.line.joined(values, 1).cpu()

    @property
    def effort(self) -> Effort:
        return Effort(ascent=Ascent(iterations=self.spec.budget.iterations), memory=self.memory)

    def survives(self, error: Exception) -> bool:
        """Return whether the job can go on after this error: memory ran out, and no other rank waits for this one."""
        return self.bounds_survive(error) and (
            self.search_group.axis.size == 1 or isinstance(error, MemoryShortageError)
        )

    def bounds_survive(self, error: Exception) -> bool:
        """Whether bounds can go on after this error; in them the ranks of a search group ask each other nothing."""
        alone = self.network.is_alone and self.staged is None
        return is_out_of_memory(error) and (alone or isinstance(error, MemoryShortageError))

    @property
    def _at_once(self) -> int:
        """How many instances a batch has; all ranks that bound them ask."""
        each = FLOATS * sum(node.size for node in self.network.graph.nodes) * self.like.element_size()

        def least(count: int) -> int:
            own = self.network.exchange.least(count, self.device)
            return int(self.of_all_stages(torch.tensor([[own]])).min())

        with suppress(MemoryShortageError):
            return self.memory.plan(self.device, each, self.spec.budget.batch, share=2, least=least)
        return 1

    def batches(self, without: Container[int]) -> Iterator[list[int]]:
        left = [instance for instance in self.own if self.is_about(instance) and instance not in without]
        size = self._at_once
        return (left[start : start + size] for start in range(0, len(left), size))


def memory_of(spec: VerifySpec) -> MemoryBudget:
    """Return the memory that a job may take on each device."""
    limit = spec.budget.memory_gib
    return MemoryBudget() if limit is None else MemoryBudget(int(limit * GIB))


@dataclass(frozen=True)
class Refused:
    """Instances whose model cannot be bounded, and why; ``asked`` is their property if it is only too large."""

    part: frozenset[int]
    reason: str
    asked: Property | None = None
