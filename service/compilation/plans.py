"""Plans how many processes climb, and which rungs each takes: as many as cores and the device's memory allow.

A step of training takes much longer than one of inference, and a rung that makes operators of others, or code, longer
than one that does not: the first is divided where there is not room for both, and the second is the weight by which
rungs are dealt.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.compilation.run.observation import RungCase
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Phase

Plan = tuple[tuple[RungCase, ...], ...]
"""The rungs of each process, each in the order of the ladder."""
SMALL = 1 << 28
"""Bytes of parameters and buffers up to which any number of processes hold a program at once, and share the states of
its uncompiled run: writing down those of a larger one takes longer than a run of its own (16 layers of width 2048, one
H200).
"""
_PROCESSES: tuple[dict[Phase, int], ...] = (
    {"train": 3, "inference": 3},
    {"train": 3, "inference": 1},
    {"train": 2, "inference": 1},
    {"train": 1, "inference": 1},
)
"""Processes of each phase, the most first: each more starts and shares the device (8 layers of 512, one H200)."""
_COPIES: dict[Phase, int] = {"train": 12, "inference": 5}
"""How many times its size a program may need: to train, gradients, states of before, and all of it in float64."""
_CORES = 2
"""The cores of each process."""


def plans(rungs: Sequence[Rung], phases: Sequence[Phase], cores: int) -> tuple[Plan, ...]:
    """Return the plans for so many ``cores``, the one with the most processes first; the last has one process."""
    divided = [
        tuple(part for phase in phases for part in _deal_rungs(rungs, phase, processes[phase]))
        for processes in _PROCESSES
    ]
    whole = (tuple(RungCase(rung, phase) for phase in phases for rung in rungs),)
    return tuple(dict.fromkeys([*(plan for plan in divided if _CORES * len(plan) <= cores), whole]))


def choose_plan(plans: Sequence[Plan], size: int, room: int) -> int:
    """Return the index of the first plan that may fit a program of ``size`` bytes in ``room``; else of the last."""
    if size <= SMALL:
        return 0
    copies = (sum(max(_COPIES[case.phase] for case in cases) for cases in plan) for plan in plans)
    return next((index for index, each in enumerate(copies) if each * size <= room), len(plans) - 1)


def _deal_rungs(rungs: Sequence[Rung], phase: Phase, processes: int) -> list[tuple[RungCase, ...]]:
    """Deal the rungs from the top of the ladder, each to the process that has the least to do."""
    parts: list[list[Rung]] = [[] for _ in range(min(processes, len(rungs)))]
    for rung in reversed(rungs):
        min(parts, key=lambda part: sum(2 + rung.decomposes + rung.cuda_graphs for rung in part)).insert(0, rung)
    return [
        tuple(RungCase(rung, phase) for rung in part) for part in sorted(parts, key=lambda part: rungs.index(part[0]))
    ]
