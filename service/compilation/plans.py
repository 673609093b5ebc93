"""Plans how many processes climb, and which rungs each takes: as many as cores and the device's memory allow.

A step of training takes much longer than one of inference, and a rung that makes operators of others, or code, longer
than one that does not: the first is divided where there is not room for both, and the second is the weight by which
rungs are dealt. The process with the lowest rung makes the uncompiled runs for all of its phase, which compile their
first rung meanwhile, and then wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from service.compilation.run.observation import RungCase
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Phase

Plan = tuple[tuple[RungCase, ...], ...]
"""The rungs of each process, each in the order of the ladder."""
SMALL = 1 << 28
"""Bytes of parameters and buffers up to which any number of processes hold a program at once, and hand on the states of
its uncompiled runs: writing down those of a larger one takes longer than a run (16 layers of width 2048, one H200).
"""
_PROCESSES: tuple[dict[Phase, int], ...] = (
    {"train": 3, "inference": 3},
    {"train": 3, "inference": 1},
    {"train": 2, "inference": 1},
    {"train": 1, "inference": 1},
)
"""Processes of each phase, the most first: each one more starts, and shares the device (8 layers of width 512, one
H200).
"""
_COPIES: dict[Phase, int] = {"train": 12, "inference": 5}
"""How many times its size a program may need at once: in training with gradients, states of before, and all of it in
float64.
"""
_CORES = 2
"""The cores of each process."""
_UNCOMPILED = 3.5
"""The weight of the uncompiled runs: they take as long as two rungs that generate no code (both models of
``benchmarks/compile_seconds.py``, one H200).
"""


def plans(rungs: Sequence[Rung], phases: Sequence[Phase], cores: int) -> tuple[Plan, ...]:
    """Return the plans for so many ``cores``, the one with the most processes first; the last has one process."""
    divided = [
        tuple(part for phase in phases for part in _deal_rungs(rungs, phase, processes[phase]))
        for processes in _PROCESSES
    ]
    whole = (tuple(RungCase(rung, phase) for phase in phases for rung in rungs),)
    return tuple(dict.fromkeys([*(plan for plan in divided if _CORES * len(plan) <= cores), whole]))


def choose_plan(plans: Sequence[Plan], size: int, room: int) -> int:
    """Return the index of the first plan whose processes may hold a program of ``size`` bytes in a device's ``room``;
    else of the last.
    """
    if size <= SMALL:
        return 0
    fits = (index for index, plan in enumerate(plans) if sum(map(_copies, plan)) * size <= room)
    return next(fits, len(plans) - 1)


def _copies(cases: Sequence[RungCase]) -> int:
    return max(_COPIES[case.phase] for case in cases)


def _deal_rungs(rungs: Sequence[Rung], phase: Phase, processes: int) -> list[tuple[RungCase, ...]]:
    """Deal the rungs so that the last process ends as soon as it may; the first has the lowest rung."""
    parts = min(_ways_to_deal(rungs, min(processes, len(rungs))), key=_end)
    return [tuple(RungCase(rung, phase) for rung in part) for part in parts]


def _ways_to_deal(rungs: Sequence[Rung], processes: int) -> Iterator[list[list[Rung]]]:
    """Yield all ways that leave no process without a rung, each in the order of the ladder."""
    for owners in product(range(processes), repeat=len(rungs)):
        parts: list[list[Rung]] = [[] for _ in range(processes)]
        for rung, owner in zip(rungs, owners, strict=True):
            parts[owner].append(rung)
        if all(parts) and parts == sorted(parts, key=lambda part: rungs.index(part[0])):
            yield parts


def _end(parts: Sequence[Sequence[Rung]]) -> tuple[float, float]:
    """Return when the last process ends, and the sum of all ends."""
    ends = [_UNCOMPILED + sum(map(_weight, part)) for part in parts]
    ends[1:] = [end - _weight(part[0]) / 2 for end, part in zip(ends[1:], parts[1:], strict=True)]
    return max(ends), sum(ends)


def _weight(rung: Rung) -> float:
    return 2 + rung.decomposes + rung.generates_code + rung.cuda_graphs / 2
