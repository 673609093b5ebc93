"""Models in pipeline stages: this rank has the layers of one, and all stages bound the model together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import Analysis, Bounder, BoundOptions, Method
from service.bounds.methods.base import PlaneAnalysis
from service.bounds.stages import Staged, StagedAnalysis
from service.verification.engine.arithmetic import PLAIN, Arithmetic
from service.verification.engine.base import BoundingEngine


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
