"""What a training job's pipeline is going to do: its schedule with predicted times, from the spec alone, without torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from service.jobs.spec import TrainSpec
from service.schedules.schedule import GENERATORS, Instruction, Op, Schedule
from service.schedules.verify import DURATION, _source, verify


@dataclass(frozen=True)
class PlannedCell:
    """One computation. Times are in units of one forward of a stage."""

    op: str
    stage: int
    micro_batch: int
    start: float
    end: float


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
    """The plan of one optimizer step; ``None`` when the spec has no pipeline."""
    if spec.parallel.pp == 1:
        return None
    schedule = GENERATORS[spec.pipeline.schedule](spec.parallel.pp, spec.micro_batches)
    report = verify(schedule)
    cells = _timeline(schedule)
    rows = tuple(
        PlannedRank(
            rank=rank,
            stages=tuple(stage for stage, owner in enumerate(schedule.owners) if owner == rank),
            peak_activations=report.peak_activations[rank],
            peak_buffers=report.peak_buffers[rank],
            cells=tuple(
                PlannedCell(str(each.op), each.stage, each.micro_batch, start, end) for each, start, end in own
            ),
        )
        for rank, own in enumerate(cells)
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


def _timeline(schedule: Schedule) -> list[list[tuple[Instruction, float, float]]]:
    queues = [deque(each for each in instructions if each.op in DURATION) for instructions in schedule.ranks]
    finished: dict[Instruction, float] = {}
    clock = [0.0] * len(queues)
    out: list[list[tuple[Instruction, float, float]]] = [[] for _ in queues]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and ((source := _source(queue[0], schedule.stages)) is None or source in finished):
                instruction = queue.popleft()
                start = clock[rank] if source is None else max(clock[rank], finished[source])
                clock[rank] = finished[instruction] = start + DURATION[instruction.op]
                out[rank].append((instruction, start, clock[rank]))
    return out
