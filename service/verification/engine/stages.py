"""The engines: of a rank with all layers, alone or on tensor-parallel ranks, and of a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from service.bounds.graph_module import ExecutableGraph
from service.bounds.interval import Interval
from service.bounds.methods import Analysis, Bounder, BoundOptions, Method, repeatedly
from service.bounds.methods.base import PlaneAnalysis
from service.bounds.network import Network
from service.bounds.stages import Staged, StagedAnalysis
from service.verification.engine.base import PLAIN, Arithmetic, BoundingEngine


@dataclass(frozen=True, eq=False)
class StagesEngine(BoundingEngine):
    """A :class:`BoundingEngine` whose network is one stage of the model; the ranks of a stage may share it by tensor
    parallelism. Boxes and rows are of the whole model, and flat.
    """

    staged: Staged

    @classmethod
    def of(cls, staged: Staged, arithmetic: Arithmetic = PLAIN) -> StagesEngine:
        """Return the engine of a divided model."""
        return cls(staged.network, arithmetic, staged.line.device, staged)

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def stages(self) -> Staged:
        return self.staged

    @property
    def outputs(self) -> int:
        return self.staged.outputs

    @property
    def entries(self) -> int:
        return self.staged.entries

    @property
    def widest(self) -> int:
        return self.staged.widest

    def gathered(self, values: Tensor, dim: int = 0) -> Tensor:
        return self.staged.line.joined(values, dim)

    def differentiable(self, module: nn.Module) -> nn.Module:
        return module

    def bounder(self, method: Method) -> Bounder:
        return self.staged.method(self.arithmetic.bounder(method))

    def repeated_bounder(self, method: Method) -> Bounder:
        return self.bounder(method)

    def shaped(self, box: Interval) -> Interval:
        return box

    def shaped_rows(self, rows: Tensor) -> Tensor:
        return rows[None]

    @property
    def refines(self) -> bool:
        return False

    def for_activation_search(self) -> StagesEngine:
        return self

    def entering(self, analysis: Analysis, box: Interval) -> Interval:
        assert isinstance(analysis, StagedAnalysis)
        return analysis.entering

    def rigorous_analysis(self, method: Method, box: Interval, options: BoundOptions) -> PlaneAnalysis:
        analysis = self.staged.method(method.rigorous)(self.network, box, options)
        assert isinstance(analysis, StagedAnalysis)
        return analysis


CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class NetworkEngine(BoundingEngine):
    """A :class:`BoundingEngine` whose network is the whole model, or this rank's shards of every layer."""

    network: Network
    arithmetic: Arithmetic = PLAIN
    device: torch.device = CPU

    @property
    def is_alone(self) -> bool:
        return self.network.is_alone

    @property
    def outputs(self) -> int:
        return self.network.graph.output.size

    @property
    def entries(self) -> int:
        return sum(node.size for node in self.network.graph.nodes)

    @property
    def widest(self) -> int:
        return self.network.widest

    def gathered(self, values: Tensor, dim: int = 0) -> Tensor:
        return values

    def differentiable(self, module: nn.Module) -> nn.Module:
        # The model's own collectives need not have gradients; those of its graph do.
        return module if self.network.tp_group.axis.size == 1 else ExecutableGraph(self.network.graph)

    def bounder(self, method: Method) -> Bounder:
        return self.arithmetic.bounder(method)

    def repeated_bounder(self, method: Method) -> Bounder:
        return repeatedly(self.bounder(method), self.device)

    def shaped(self, box: Interval) -> Interval:
        return box.arranged(lambda end: end.reshape(-1, *self.network.graph.input.shape))

    def shaped_rows(self, rows: Tensor) -> Tensor:
        return rows.reshape(1, -1, *self.network.graph.output.shape)

    @property
    def refines(self) -> bool:
        return self.arithmetic.refines and self.network.tp_group.axis.size == 1

    def for_activation_search(self) -> NetworkEngine:
        return replace(self, network=self.arithmetic.for_activation_search(self.network))

    def entering(self, analysis: Analysis, box: Interval) -> Interval:
        return self.shaped(box)

    def rigorous_analysis(self, method: Method, box: Interval, options: BoundOptions) -> PlaneAnalysis:
        return method.rigorous(self.network, self.shaped(box), options)
