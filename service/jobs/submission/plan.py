"""Plans the steps of a training job's pipeline: its schedule with predicted times, from the spec alone."""

from __future__ import annotations

from dataclasses import dataclass

from service.jobs.spec.train import TrainSpec
from service.schedules import generator
from service.schedules.schedule import ComputationSpan
from service.schedules.verify import predict, verify


@dataclass(frozen=True)
class PlannedCell:
    """One computation. Times are in units of one forward of a stage."""

    op: str
    stage: int
    micro_batch: int
    start: float
    end: float

    @classmethod
    def of(cls, span: ComputationSpan) -> PlannedCell:
        computed = span.instruction
        return cls(str(computed.op), computed.stage, computed.micro_batch, span.start, span.end)


@dataclass(frozen=True)
class PlannedRank:
    """One rank of the pipeline: its stages, its computations in order, and the most that it keeps at once."""

    rank: int
    stages: tuple[int, ...]
    peak_activations: int
    peak_buffers: int
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True)
class Plan:
    """A pipeline's schedule. ``bubble`` is the predicted idle share of all ranks."""

    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    bubble: float
    duration: float
    rows: tuple[PlannedRank, ...]


def plan(spec: TrainSpec) -> Plan | None:
    """Return the plan of one optimizer step; ``None`` when the spec has no pipeline, or one of a program's own."""
    if spec.parallel.pp == 1 or spec.program is not None:
        return None
    pipeline = spec.pipeline
    schedule = generator(pipeline.schedule)(spec.parallel.pp, pipeline.stages_per_rank, spec.micro_batches)
    report, spans = verify(schedule), predict(schedule)
    rows = tuple(
        PlannedRank(
            rank=rank,
            stages=tuple(stage for stage, owner in enumerate(schedule.owners) if owner == rank),
            peak_activations=report.peak_activations[rank],
            peak_buffers=report.peak_buffers[rank],
            cells=tuple(PlannedCell.of(span) for span in spans if span.rank == rank),
        )
        for rank in range(spec.parallel.pp)
    )
    return Plan(
        schedule=spec.pipeline.schedule,
        ranks=spec.parallel.pp,
        stages=schedule.stages,
        micro_batches=schedule.micro_batches,
        bubble=report.bubble,
        duration=max(row.cells[-1].end for row in rows),
        rows=rows,
    )
