"""Holds the model under verification: a network to bound, a module to attack, and the check of a counterexample.

Every counterexample of an attack, a search or a linear program counts only by
:meth:`ModelUnderVerification.first_confirmed`. Witnesses, which are evaluated before any bound, are judged by
:mod:`service.verification.counterexamples`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.exact import exact_values
from service.bounds.flat import by_instance
from service.bounds.graph import Graph, Node, Ref
from service.bounds.graph_module import ExecutableGraph
from service.bounds.interval import Interval
from service.bounds.memory import MemoryBudget, MemoryShortageError, in_parts, make_room
from service.bounds.methods import BoundOptions
from service.bounds.network import Network, prepare
from service.bounds.operators import STEPPED
from service.bounds.progress import OutOfTimeError
from service.verification.bab.heuristics import Heuristics
from service.verification.bab.search_group import SINGLE_RANK, SearchGroup
from service.verification.bab.settings import SearchSettings
from service.verification.bab.specification import CPU, Counterexample, Specification
from service.verification.bab.split_tree import SplitRecord
from service.verification.bab.visited import VisitedInputs
from service.verification.engine import BoundingEngine, NetworkEngine

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running


def has_steps(graph: Graph) -> bool:
    """Return whether the function may jump."""
    return any(node.operator in STEPPED for node in graph.nodes)


class RampedGraph(ExecutableGraph):
    """``(n, features)`` to ``(n, outputs)``: the function itself, with the gradients of one whose steps are ramps
    (straight-through, Bengio et al., 2013).
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._shape = graph.input.shape
        self._deciding = [
            (_decided_by(node), STEPPED[node.operator]) for node in graph.nodes if node.operator in STEPPED
        ]

    def forward(self, x: Tensor) -> Tensor:
        return by_instance(super().forward(x.reshape(-1, *self._shape)))

    def deciding(self, x: Tensor) -> Tensor:
        """Return all values ``(n, entries)`` that decide steps."""
        values = self._deciding_values(x)
        return torch.cat([by_instance(values[name]) for name, _ in self._deciding], dim=1)

    def sides(self, x: Tensor) -> Tensor:
        """Return on which side of their step each of these values is, ``(n, entries)``."""
        values = self._deciding_values(x)
        return torch.cat([by_instance(operator.side(values[name]).to(x)) for name, operator in self._deciding], dim=1)

    def _deciding_values(self, x: Tensor) -> dict[str, Tensor]:
        names = {name for name, _ in self._deciding}
        return {name: value for name, value in self.steps(x.reshape(-1, *self._shape)) if name in names}

    def _computed(self, node: Node, arguments: Mapping[str, Any]) -> Tensor:
        operator = STEPPED.get(node.operator)
        return super()._computed(node, arguments) if operator is None else operator.ramp(arguments)


def _decided_by(node: Node) -> str:
    value = node.arguments[STEPPED[node.operator].decided_by]
    assert isinstance(value, Ref)
    return value.name


T = TypeVar("T")
ROUNDED = 1e-12
"""More than sums in float64 lose, as a share of the largest output."""
MOST_ENTRIES, MOST_TERMS = 2**10, 2**11
"""The most entries of all values, and terms of all sums, of a network whose outputs are computed without rounding where
float64 leaves a violation in doubt: that takes some ten milliseconds.
"""


@dataclass(frozen=True, eq=False)
class ModelUnderVerification:
    """A model in the forms that a search needs, on this rank.

    ``module`` and the engine's network are in ``dtype``; ``float64_module`` is the module in float64, ``runtime``
    onnxruntime for a model that came from ONNX. The ranks of ``search_group`` decide together, and so do the
    ranks that share the model. ``options`` is for optimised bounds, and has the memory for everything;
    ``heuristics`` choose the splits, ``settings`` tune the rest. ``traced`` keeps the result of :attr:`ramped`,
    ``splits`` the splits of searches, as far as it has room, and ``visited`` the inputs of a decision.
    """

    module: nn.Module
    engine: BoundingEngine
    float64_module: nn.Module
    runtime: Running | None
    dtype: torch.dtype
    search_group: SearchGroup = SINGLE_RANK
    options: BoundOptions = field(default_factory=BoundOptions)
    heuristics: Heuristics = field(default_factory=Heuristics)
    settings: SearchSettings = field(default_factory=SearchSettings)
    traced: dict[nn.Module, RampedGraph] = field(default_factory=dict)
    splits: SplitRecord = field(default_factory=SplitRecord)
    visited: VisitedInputs = field(default_factory=VisitedInputs)

    @classmethod
    def of(cls, data: bytes, dtype: torch.dtype, device: torch.device = CPU) -> ModelUnderVerification:
        """Read a model from an ONNX file's content. Raises ``UnsupportedModelError``."""
        from service.bounds.onnx.model import load_both  # noqa: PLC0415 - brings onnx, which only these models need

        module, runtime = load_both(data)
        float64_module = load_both(data)[0].to(device, torch.float64)
        module = module.to(device, dtype)
        engine = NetworkEngine(prepare(module, (module.features,)), device=device)
        return cls(module, engine, float64_module, runtime, dtype)

    @property
    def network(self) -> Network:
        """Return this rank's part of the network."""
        return self.engine.network

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def is_alone(self) -> bool:
        """Return whether no other rank takes part in a decision."""
        return self.engine.is_alone and self.search_group.axis.size == 1

    @property
    def memory(self) -> MemoryBudget:
        return self.options.memory

    @property
    def ramped(self) -> RampedGraph | None:
        """Return the model in float64 with steps that pass gradients; ``None`` if it has no steps, or if other
        ranks have a part of it.
        """
        if not self.engine.is_alone or not has_steps(self.network.graph):
            return None
        module = self.float64_module
        if module not in self.traced:
            graph = prepare(module, self.network.graph.input.shape).graph
            self.traced[module] = RampedGraph(graph).to(self.device)
        return self.traced[module]

    def in_parts(self, total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
        """Run ``run`` for some of ``total`` inputs at a time; fewer if memory runs out and no other rank waits."""
        return in_parts(total, at_once, run, self.device, alone=self.engine.is_alone)

    def together(self, stage: str, run: Callable[[], T]) -> T:
        """Return the result of ``run``, in which no rank of the search group needs another.

        Raises :class:`~service.bounds.memory.MemoryShortageError` on all of them if memory ran out on one.
        """
        shortage = None
        try:
            result = run()
        except Exception as error:
            if not self.engine.survives(error):
                raise
            shortage = self.memory.shortage(stage, self.device, error)
        if shortage is not None:
            make_room(self.device)
        if self.search_group.anywhere(shortage is not None, self.device):
            raise shortage or MemoryShortageError("there was not enough for another rank of the search", stage)
        return result

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs ``(n, features)``, differentiable.

        On tensor-parallel ranks they are equal to the last bit, so that decisions from them are too.
        """
        tp_group = self.network.tp_group
        return tp_group.agree(self.module(tp_group.agree(x)))

    @torch.no_grad()
    def first_confirmed(self, specification: Specification, candidates: Tensor) -> Counterexample | None:
        """Return the first candidate ``(n, features)`` that violates the property in float64 and in onnxruntime, or
        ``None``.

        Each is moved into the exact box or ball first, and its outputs are compared exactly. If a box contains
        no float64 input, the distance of the nearest one may change the outputs; in a rigorous search, rounding
        may too.
        """
        tp_group = self.network.tp_group
        exact = tp_group.agree(specification.nearest(candidates.double()))
        outputs = tp_group.agree(self.float64_module(exact))
        distances = specification.distance_to_nearest(specification.excess(outputs, exact))
        self.visited.add(specification, exact, distances)
        suspects = distances <= 0
        for x, outputs_at_x in zip(exact[suspects], outputs[suspects], strict=True):
            violates = specification.reached(x.tolist(), Interval.point(outputs_at_x))
            if violates and self._is_confirmed(specification, x, outputs_at_x):
                return tuple(x.tolist())
        return None

    def _is_confirmed(self, specification: Specification, x: Tensor, outputs: Tensor) -> bool:
        """Return whether onnxruntime agrees that ``x`` ``(features,)`` violates the property, at ``outputs``
        ``(outputs,)`` and at all other outputs that rounding, or the distance of ``x`` from the exact box,
        leaves possible.
        """
        if self.runtime is not None:
            runtime_outputs = torch.from_numpy(self.runtime.flat(np.asarray(x.cpu()))).to(x.device)
            if not specification.reached(x.tolist(), Interval.point(self.network.tp_group.agree(runtime_outputs))):
                return False
        missed = specification.missed > 0
        if (enclose := self.engine.enclosure(self.options)) is not None:
            around = Interval(torch.where(missed, specification.lower, x), torch.where(missed, specification.upper, x))
            enclosed = enclose(around.map(lambda end: end[None]))
        elif bool(missed.any()):
            enclosed = self._bound_moved_outputs(x, outputs, specification.missed)
        else:
            return self._is_beyond_rounding(specification, x, outputs)
        if specification.reached(x.tolist(), enclosed):
            return True
        exact = None if bool(missed.any()) else self.engine.exact_outputs(x, self.options.deadline)
        return exact is not None and specification.reached_by(x.tolist(), exact, exact)

    def _is_beyond_rounding(self, specification: Specification, x: Tensor, outputs: Tensor) -> bool:
        """Return whether ``x`` violates the property by more than float64 loses, or else without any rounding, where
        the network is small enough to compute that. At a step, rounding may decide all.
        """
        lost = (inf if has_steps(self.network.graph) else ROUNDED) * outputs.abs().amax()
        if specification.reached(x.tolist(), Interval(outputs - lost, outputs + lost)):
            return True
        if self._exact_network is None:
            return True
        given = [Fraction(each) for each in x.tolist()]
        try:
            exact = exact_values(self._exact_network, given, x, MOST_TERMS, self.options.deadline)
        except OutOfTimeError:
            return False
        return exact is None or specification.reached_by(x.tolist(), exact, exact)

    @cached_property
    def _exact_network(self) -> Network | None:
        """Return the network in float64, if it is here, and small."""
        graph = self.network.graph
        if not self.engine.is_alone or sum(node.size for node in graph.nodes) > MOST_ENTRIES:
            return None
        return prepare(self.float64_module, graph.input.shape)

    def _bound_moved_outputs(self, x: Tensor, outputs: Tensor, missed: Tensor) -> Interval:
        """Bound the outputs ``(outputs,)`` when the input moves by ``missed``, by twice the first order."""
        with torch.enable_grad():
            inputs = x[None].to(self.dtype).requires_grad_()
            slopes = [gradient_at(inputs, output, keep=True)[0] for output in self.outputs(inputs)[0]]
        drift = 2 * self.network.tp_group.agree(torch.stack(slopes).double().abs() @ missed)
        far = torch.full_like(outputs, torch.inf)
        return Interval(torch.nextafter(outputs - drift, -far), torch.nextafter(outputs + drift, far))


def gradient_at(inputs: Tensor, total: Tensor, *, keep: bool = False) -> Tensor:
    """Return the gradient of a number; 0 if it depends on its input only by steps, as by an index into a table."""
    if not total.requires_grad:
        return torch.zeros_like(inputs)
    (found,) = torch.autograd.grad(total, inputs, retain_graph=keep, allow_unused=True, materialize_grads=True)
    return found


def worst_first(values: Tensor, count: int) -> Sequence[int]:
    """Return the indices of the ``count`` smallest values."""
    return values.topk(min(count, len(values)), largest=False).indices.tolist()
