"""Searches for stale memory that would hold the right numbers.

If a tensor is the same in every iteration, such as the number of a token, a value left over from the iteration before
is right, and no comparison can tell it from a new one. So the program runs once more, uncompiled and compiled, with its
parameters shuffled before each iteration. A tensor that is the same even then is certainly new only if no result of a
compiled call was alive when the next replays began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.compilation.monitor.usage import Usage
from service.compilation.run.baseline import Baseline
from service.compilation.run.built_program import BuiltProgram
from service.compilation.run.compare_runs import compare_runs
from service.compilation.run.recorded_run import RecordedRun, Snapshot, record_uncompiled
from service.compilation.run.sampling import Key
from service.jobs.spec.compile import Tolerance

_KINDS = frozenset({"loss", "output", "gradient"})


@dataclass(frozen=True)
class Audit:
    """Whether stale memory is read that parity cannot see: if neither ``read`` nor ``problem`` is set, none is."""

    unseen: tuple[str, ...] = ()
    """Tensors whose stale value would be the right one."""
    read: str = ""
    """A difference that proves that stale memory is read."""
    problem: str = ""
    """Why it cannot be told whether any is read."""


def unseen_in(baseline: Baseline, period: int) -> tuple[Key, ...]:
    """Return the tensors that equal those of the iteration before, or of one ``period`` before, in every iteration.

    Equal to the last bit: a stale value that differs at all shows in the numbers computed from it.
    """
    records = baseline.eager.records
    keys = dict.fromkeys(key for record in records for key, value in record.tensors.items() if value.numel())
    return tuple(key for key in keys if key[0] in _KINDS and not _is_seen(key, baseline, period))


def _is_seen(key: Key, baseline: Baseline, period: int) -> bool:
    values = [record.tensors.get(key) for record in baseline.eager.records]
    return any(
        all(not _same(value, values[index - back]) for back in {1, period} if index >= back)
        for index, value in enumerate(values)
        if index and value is not None
    )


def _same(value: Tensor, before: Tensor | None) -> bool:
    return before is not None and value.shape == before.shape and torch.equal(value, before)


def audit(
    keys: Sequence[Key],
    compiled: BuiltProgram,
    follow: Callable[[BuiltProgram, Sequence[Snapshot]], tuple[RecordedRun, Usage]],
    baseline: Baseline,
    tolerance: Tolerance,
) -> Audit:
    """Return the audit of the unseen tensors ``keys`` after their program ran with shuffled parameters.

    ``follow`` runs and watches ``compiled``, each iteration from one of the states.
    """
    count = baseline.iterations
    starts = [baseline.eager.starts[0].shuffled(compiled, iteration) for iteration in range(count)]
    other = baseline.begun_like(record_uncompiled(compiled.program, compiled.phase, count, starts))
    found, usage = follow(compiled, starts)
    names = tuple(map(" ".join, keys))
    for each in compare_runs(found, other, tolerance):
        if (each.kind, each.name) in keys and not each.passed:
            held = next((f"; it may be {held}" for held in usage.overlapping if held.holders), "")
            where = f"{each.kind} {each.name}, iteration {each.iteration}"
            return Audit(names, f"{where}: off by {each.max_abs:.3g}{held}")
    left = set(unseen_in(other, compiled.program.period)).intersection(keys)
    alive = (*usage.held, *usage.overlapping) if left else ()
    return Audit(names, problem=f"{alive[0]}" if alive else "")
