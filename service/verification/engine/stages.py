"""The engines: of a rank with all layers, alone or on tensor-parallel ranks, and of a pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from service.bounds.graph_module import ExecutableGraph
from service.bounds.interval import Interval
from service.bounds.methods import Analysis, Bounder, BoundOptions, Method, repeatedly
from service.bounds.methods.base import PlaneAnalysis
from service.bounds.network import Network
from service.bounds.stages import Staged, StagedAnalysis
from service.verification.engine.base import PLAIN, Arithmetic, BoundingEngine


class StagesEngine(BoundingEngine):
    """A :class:`BoundingEngine` whose network is one stage of the model; the ranks of a stage may share it by tensor
    parallelism. Boxes and rows are of the whole model, and flat.
    """

    def __init__(self, staged: Staged, arithmetic: Arithmetic = PLAIN) -> None:
        sizes = staged.outputs, staged.entries, staged.widest
        super().__init__(staged.network, arithmetic, staged.line.device, staged, *sizes, is_alone=False, refines=False)
        self._staged = staged

    def gathered(self, values: Tensor, dim: int = 0) -> Tensor:
        return self._staged.line.joined(values, dim)

    def differentiable(self, module: nn.Module) -> nn.Module:
        return module

    def bounder(self, method: Method) -> Bounder:
        return self._staged.method(self.arithmetic.bounder(method))

    def repeated_bounder(self, method: Method) -> Bounder:
        return self.bounder(method)

    def shaped(self, box: Interval) -> Interval:
        return box

    def shaped_rows(self, rows: Tensor) -> Tensor:
        return rows[None]

    def for_activation_search(self) -> StagesEngine:
        return self

    def entering(self, analysis: Analysis, box: Interval) -> Interval:
        assert isinstance(analysis, StagedAnalysis)
        return analysis.entering

    def rigorous_analysis(self, method: Method, box: Interval, options: BoundOptions) -> PlaneAnalysis:
        analysis = self._staged.method(method.rigorous)(self.network, box, options)
        assert isinstance(analysis, StagedAnalysis)
        return analysis


CPU = torch.device("cpu")


class NetworkEngine(BoundingEngine):
    """A :class:`BoundingEngine` whose network is the whole model, or this rank's shards of every layer."""

    def __init__(self, network: Network, arithmetic: Arithmetic = PLAIN, device: torch.device = CPU) -> None:
        graph = network.graph
        super().__init__(
            network,
            arithmetic,
            device,
            stages=None,
            outputs=graph.output.size,
            entries=sum(node.size for node in graph.nodes),
            widest=network.widest,
            is_alone=network.is_alone,
            refines=arithmetic.refines and network.tp_group.axis.size == 1,
        )

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

    def for_activation_search(self) -> NetworkEngine:
        network = self.arithmetic.for_activation_search(self.network)
        return NetworkEngine(network, self.arithmetic, self.device)

    def entering(self, analysis: Analysis, box: Interval) -> Interval:
        return self.shaped(box)

    def rigorous_analysis(self, method: Method, box: Interval, options: BoundOptions) -> PlaneAnalysis:
        return method.rigorous(self.network, self.shaped(box), options)
