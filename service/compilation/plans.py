"""Plans how many processes climb, and which rungs each takes: as many as cores and the device's memory allow.

A step of training takes much longer than one of inference, and a rung that makes operators of others, or code, longer
than one that does not: the first is divided where there is not room for both, and the second is the weight by which
rungs are dealt. The first process of a phase makes the uncompiled runs for all of them, which compile their first rung
meanwhile, and then wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest

from service.compilation.forks import CORES, PROCESSES
from service.compilation.run.observation import RungCase
from service.compilation.rungs import Rung
from service.jobs.spec.compile import Phase

Plan = tuple[tuple[RungCase, ...], ...]
"""The rungs of each process, each in the order of the ladder."""
SMALL = 1 << 28
"""Bytes of parameters and buffers up to which any number of processes hold a program at once, and hand on the states of
its uncompiled runs: writing down those of a larger one takes longer than a run (16 layers of width 2048, one H200).
"""
_COPIES: dict[Phase, int] = {"train": 12, "inference": 5}
"""How many times its size a program may need at once: in training with gradients, states of before, and all of it in
float64.
"""
_UNCOMPILED, _VISIT, _INFERENCE = 3.5, 1.0, 0.4
"""The weights of the uncompiled runs, of one step of them, and of what a rung of inference takes of one of training:
seconds of both models of ``benchmarks/compile_seconds.py`` on one H200, divided by those of half a rung of training
that generates no code.
"""


def plans(rungs: Sequence[Rung], phases: Sequence[Phase], cores: int) -> tuple[Plan, ...]:
    """Return the plans for so many ``cores``, the one with the most processes first; the last has one process."""
    divided = (_divide(rungs, phases, processes, helps=helps) for processes in PROCESSES for helps in (True, False))
    whole = (tuple(RungCase(rung, phase) for phase in phases for rung in rungs),)
    return tuple(dict.fromkeys([*(plan for plan in divided if CORES * len(plan) <= cores), whole]))


def choose_plan(plans: Sequence[Plan], size: int, room: int) -> int:
    """Return the index of the first plan that may fit a program of ``size`` bytes in ``room``; else of the last."""
    if size <= SMALL:
        return 0
    copies = (sum(max(_COPIES[case.phase] for case in cases) for cases in plan) for plan in plans)
    return next((index for index, each in enumerate(copies) if each * size <= room), len(plans) - 1)


def _divide(rungs: Sequence[Rung], phases: Sequence[Phase], processes: Mapping[Phase, int], *, helps: bool) -> Plan:
    """Divide the rungs of each phase among so many processes of its own. Those of inference end much sooner than those
    of training, which come first: if it ``helps``, they may then take rungs of these, for which they need more memory.
    """
    own = {phase: min(processes[phase], len(rungs)) for phase in phases}
    inference = _deal(rungs, [0.0] * own["inference"]) if "inference" in own else []
    free = [_INFERENCE * end + _VISIT for end in _ends(inference, [0.0] * len(inference))]
    train = _deal(rungs, [0.0] * own["train"] + free * helps) if "train" in own else []
    before: list[list[Rung]] = [[]] * own.get("train", 0) + inference
    return tuple(
        (*(RungCase(rung, "inference") for rung in first), *(RungCase(rung, "train") for rung in then))
        for first, then in zip_longest(before, train, fillvalue=())
    )


def _deal(rungs: Sequence[Rung], free: Sequence[float]) -> list[list[Rung]]:
    """Deal the rungs of a phase to processes that are free at these times, so that the last ends as soon as it may.

    Those that are free at once get one at least, and the first of them makes the uncompiled runs.
    """

    def end(parts: list[list[Rung]]) -> tuple[float, float]:
        ends = _ends(parts, free)
        return max(ends), sum(ends)

    return min(_ways_to_deal(rungs, free), key=end)


def _ways_to_deal(rungs: Sequence[Rung], free: Sequence[float]) -> Iterator[list[list[Rung]]]:
    """Yield the ways to deal them, each in the order of the ladder, but not those that differ by names alone."""
    own = sum(not each for each in free)
    for owners in product(range(len(free)), repeat=len(rungs)):
        if [*dict.fromkeys(owner for owner in owners if owner < own)] == [*range(own)]:
            parts: list[list[Rung]] = [[] for _ in free]
            for rung, owner in zip(rungs, owners, strict=True):
                parts[owner].append(rung)
            yield parts


def _ends(parts: Sequence[Sequence[Rung]], free: Sequence[float]) -> list[float]:
    """Return when each process ends: of its first rung, half is compiling and running, which needs no baseline."""
    ends = []
    for index, (part, begin) in enumerate(zip(parts, free, strict=True)):
        early = _weight(part[0]) / 2 if index and part else 0.0
        ends.append(max(begin + early, _UNCOMPILED) + sum(map(_weight, part)) - early if part else begin)
    return ends


def _weight(rung: Rung) -> float:
    return 2 + rung.decomposes + rung.generates_code + rung.cuda_graphs / 2
