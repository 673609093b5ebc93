"""Defines engines, which bound a model and decide for all ranks that have it, and the two arithmetics of bounds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from service.bounds.exact import Values, exact_outputs
from service.bounds.interval import Interval
from service.bounds.memory import MemoryShortageError, is_out_of_memory
from service.bounds.methods import IBP, Analysis, Bounder, BoundOptions, Method
from service.bounds.methods.base import PlaneAnalysis
from service.bounds.network import Network
from service.bounds.softmax_sums import with_softmax_sums
from service.bounds.stages import Staged
from service.parallel.local_copy import local_copy

T = TypeVar("T")


def _same(value: T) -> T:
    return value


def _in_double(module: nn.Module) -> nn.Module:
    return local_copy(module).double()


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of an engine, and its demands on a search: plain, or rigorous.

    ``dtype`` is the type in which a job computes its bounds; ``note`` follows a method's name in results. ``certifies``
    says that every claim must be checked over the reals; ``refines`` that a search may tighten intermediate bounds by
    methods that have no rigorous form.
    """

    dtype: torch.dtype
    note: str
    certifies: bool
    refines: bool
    bounder: Callable[[Method], Bounder]
    """Returns a bounder of networks by a method, in this arithmetic."""
    module_to_bound: Callable[[nn.Module], nn.Module]
    """Returns the module to bound: the same function, in this arithmetic's type."""
    for_activation_search: Callable[[Network], Network]
    """Returns the network with the tightest relaxations that a search over activations may use."""

    def for_numbers(self, dtype: torch.dtype) -> Arithmetic:
        """Return this arithmetic for a model that computes in ``dtype``."""
        if self.certifies:
            return self
        return PLAIN_DOUBLE if dtype == torch.float64 else PLAIN

    def certifying(self, make: Callable[[], T]) -> T | None:
        """Return ``make()`` if claims must be checked over the reals, else ``None``."""
        return make() if self.certifies else None


PLAIN = Arithmetic(
    torch.float32,
    "",
    certifies=False,
    refines=True,
    bounder=attrgetter("plain"),
    module_to_bound=_same,
    for_activation_search=with_softmax_sums,
)
"""Floating point of the model's own width, rounded to nearest: margins for rounding are estimates."""
PLAIN_DOUBLE = replace(PLAIN, dtype=torch.float64)
RIGOROUS = Arithmetic(
    torch.float64,
    " (rigorous)",
    certifies=True,
    refines=False,
    bounder=attrgetter("rigorous"),
    module_to_bound=_in_double,
    for_activation_search=_same,
)
"""Float64 with every rounding accounted for: bounds hold for the function over the reals."""


@dataclass(frozen=True, eq=False)
class BoundingEngine(ABC):
    """Bounds one model. All ranks that have it together call the same methods in the same order.

    ``network`` is this rank's part of the model, on ``device``.
    """

    network: Network
    arithmetic: Arithmetic
    device: torch.device
    stages: Staged | None
    """The pipeline stages of the model; ``None`` if this rank has a part of every layer."""
    outputs: int
    """The number of the model's outputs."""
    entries: int
    """The number of entries of all of the model's values; the same on all stages of a model."""
    widest: int
    """The number of entries of the model's largest value; the same on all stages of a model."""
    is_alone: bool
    """Whether this rank has the whole model, so that no other waits for a step of it."""
    refines: bool
    """Whether a search over activations may tighten the intermediate bounds that all its domains share."""

    @abstractmethod
    def gathered(self, values: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the tensors of the pipeline stages along ``dim``, on all of them."""

    def anywhere(self, flag: bool) -> bool:
        """Return whether the flag is set on any of the ranks that have the model together."""
        found = self.network.tp_group.largest(int(flag), self.device)
        return bool(self.gathered(torch.tensor([found])).any())

    def late(self, deadline: float) -> bool:
        """Return whether ``deadline`` (``time.monotonic``) has passed for any of the ranks."""
        return self.anywhere(time.monotonic() > deadline)

    def least(self, count: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return int(self.gathered(torch.tensor([self.network.tp_group.least(count, self.device)])).min())

    def survives(self, error: Exception) -> bool:
        """Return whether smaller work can continue after this error: memory ran out, and no other rank waits."""
        return is_out_of_memory(error) and (self.is_alone or isinstance(error, MemoryShortageError))

    @abstractmethod
    def differentiable(self, module: nn.Module) -> nn.Module:
        """Return a module of the same function whose gradients reach the inputs on every rank."""

    @abstractmethod
    def bounder(self, method: Method) -> Bounder:
        """Return a bounder of the whole model by ``method``, given any network of this rank."""

    @abstractmethod
    def repeated_bounder(self, method: Method) -> Bounder:
        """Return such a bounder for many analyses of boxes of one shape; its cache ends with it."""

    @abstractmethod
    def shaped(self, box: Interval) -> Interval:
        """Return boxes ``(n, features)`` in the shape that :meth:`bounder` takes."""

    @abstractmethod
    def shaped_rows(self, rows: Tensor) -> Tensor:
        """Return rows ``(rows, outputs)`` of the output as ``(1, rows, *shape)``, as the analyses take them."""

    def analyse(self, method: Method, box: Interval, options: BoundOptions) -> Analysis:
        """Bound the model in boxes ``(n, features)``."""
        return self.bounder(method)(self.network, self.shaped(box), options)

    def lower_bounds(self, analysis: Analysis, rows: Tensor) -> Tensor:
        """Return lower bounds ``(rows,)`` of rows ``(rows, outputs)`` in an analysis of one box, equal on all ranks."""
        found: Tensor = self.network.tp_group.agree(analysis.lower_bounds(self.shaped_rows(rows))[0])
        return found

    def output_bounds(self, method: Method, box: Interval, options: BoundOptions) -> Interval:
        """Bound all outputs ``(outputs,)`` in one box ``(1, features)``, in its dtype."""
        identity = torch.eye(self.outputs, dtype=box.lower.dtype, device=box.lower.device)
        found = self.lower_bounds(self.analyse(method, box, options), torch.cat([identity, -identity]))
        return Interval(found[: self.outputs], -found[self.outputs :])

    def enclosure(self, options: BoundOptions) -> Callable[[Interval], Interval] | None:
        """Return an enclosure of the outputs over the reals in a box ``(1, features)``, if counterexamples need it."""
        return self.arithmetic.certifying(lambda: lambda box: self.output_bounds(IBP, box, options))

    def exact_outputs(self, x: Tensor, deadline: float = inf) -> Values | None:
        """Return the outputs at an input ``(features,)`` without any rounding, if counterexamples need that and
        it is possible until ``deadline``.
        """
        if not self.is_alone:
            return None
        return self.arithmetic.certifying(lambda: exact_outputs(self.network, x, deadline))

    @abstractmethod
    def for_activation_search(self) -> BoundingEngine:
        """Return the engine of a search over activations, whose relaxations are as tight as the arithmetic allows."""

    @abstractmethod
    def entering(self, analysis: Analysis, box: Interval) -> Interval:
        """Return bounds of the input of this rank's network in an analysis of one box of the model's inputs."""

    @abstractmethod
    def rigorous_analysis(self, method: Method, box: Interval, options: BoundOptions) -> PlaneAnalysis:
        """Bound the model rigorously in boxes ``(n, features)`` of float64."""
