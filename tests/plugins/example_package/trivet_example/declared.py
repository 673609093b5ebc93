"""What the package brings, without torch: the service reads it to check jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trivet.plugins import (
    DataConfig,
    DataSource,
    Evaluation,
    Features,
    ModelConfig,
    ModelFamily,
    ObjectiveConfig,
    ObjectiveKind,
    OptimizerConfig,
    OptimizerKind,
    ProgramConfig,
    ProgramKind,
    Reason,
    Samples,
    ScheduleConfig,
    ScheduleKind,
)

if TYPE_CHECKING:
    from service.jobs.spec.compile import CompileSpec


class GatedConfig(ModelConfig):
    """Residual blocks ``x + down(sigmoid(gate(x)) · up(x))`` between two linear layers."""

    family: Literal["gated"] = "gated"
    in_features: int = Field(ge=1)
    width: int = Field(16, ge=1)
    inner: int = Field(32, ge=1, description="width of a block's gate, divided over tensor-parallel ranks")
    blocks: int = Field(2, ge=1)
    out_features: int = Field(ge=1)

    @property
    def places(self) -> int:
        return self.blocks

    @property
    def divided(self) -> Mapping[str, int]:
        return {"inner": self.inner}

    @property
    def reads(self) -> Samples:
        return Features(self.in_features, self.out_features, features_field="in_features", classes_field="out_features")


class RingsData(DataConfig):
    """Points on noisy rings around the origin, labelled by their ring."""

    source: Literal["rings"] = "rings"
    rings: int = Field(3, ge=2, le=16)
    samples: int = Field(512, ge=32, le=2**20)

    @property
    def gives(self) -> Samples:
        return Features(features=2, classes=self.rings)

    @property
    def held_out(self) -> int:
        return self.samples // 4


class HingeObjective(ObjectiveConfig):
    """Every other logit stays ``margin`` below that of the class (Crammer & Singer, 2001)."""

    name: Literal["hinge"] = "hinge"
    margin: float = Field(1.0, gt=0)


class SignumOptimizer(OptimizerConfig):
    """The sign of the momentum, times the rate (Bernstein et al., 2018)."""

    name: Literal["signum"] = "signum"
    momentum: float = Field(0.9, ge=0, lt=1)


class TriangleSchedule(ScheduleConfig):
    """Falls to zero and rises again, ``period`` steps from peak to peak."""

    decay: Literal["triangle"] = "triangle"
    period: int = Field(10, ge=2)

    def decayed(self, step: int, steps: int, evaluations: Sequence[Evaluation]) -> float:
        return abs(1 - 2 * (step % self.period) / self.period)


class AllocatorProgram(ProgramConfig):
    """An encoder and a scorer; the scorer is called ``rounds`` times a step."""

    name: Literal["allocator"] = "allocator"
    width: int = Field(4, ge=1)
    items: int = Field(6, ge=1)
    rounds: int = Field(3, ge=1)

    def check(self, spec: CompileSpec) -> list[Reason]:
        if (world := spec.parallel.world_size) > 1:
            return [("parallel", "the allocator runs on one device", world, "one rank")]
        return []


FAMILY = ModelFamily(GatedConfig, "trivet_example.network:build")
SOURCE = DataSource(RingsData, "trivet_example.rings:load")
PROGRAM = ProgramKind(AllocatorProgram, "trivet_example.allocator:allocator")
OPTIMIZER = OptimizerKind(SignumOptimizer, "trivet_example.signum:signum")
SCHEDULE = ScheduleKind(TriangleSchedule)
OBJECTIVE = ObjectiveKind(HingeObjective, "trivet_example.hinge:hinge")
