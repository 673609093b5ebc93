"""Evaluation: every micro-batch forward once, for any assignment of stages to ranks; nothing is kept."""

from __future__ import annotations

from service.schedules.schedule import Instruction, Op, Schedule, check_sizes, lower


def forward_only(owners: tuple[int, ...], micro_batches: int) -> Schedule:
    """Return a forward-only schedule: a rank with several stages runs the furthest one that has its input, so that
    micro-batches under way drain first.
    """
    check_sizes(len(owners), 1, micro_batches)
    ranks, stages = max(owners) + 1, len(owners)
    orders: list[list[Instruction]] = [[] for _ in range(ranks)]
    own = [[stage for stage in reversed(range(stages)) if owners[stage] == rank] for rank in range(ranks)]
    done = [0] * stages
    while done[-1] < micro_batches:
        finished = done.copy()
        for rank in range(ranks):
            ready = (each for each in own[rank] if finished[each] < (finished[each - 1] if each else micro_batches))
            if (stage := next(ready, None)) is not None:
                orders[rank].append(Instruction(Op.FORWARD, stage, done[stage]))
                done[stage] += 1
    return lower("forward_only", micro_batches, owners, orders, trains=False)
