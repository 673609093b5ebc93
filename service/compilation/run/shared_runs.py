"""Shares the uncompiled runs among the processes of a phase: one makes them, and the others take their results.

The states with which iterations begin are handed on with them, unless they are too large: then each process makes them,
as a new build and a multiple of it. Where a step leaves more than that, or where a new build of another process is not
the same to the last bit, a process makes runs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from service.compilation.run.baseline import Baseline, FirstRun, UncompiledRuns, Visit
from service.compilation.run.exchange import Exchange
from service.compilation.run.recorded_run import near_device
from service.compilation.run.sampling import Key
from service.jobs.spec.compile import Phase


@dataclass(frozen=True)
class _WithoutStates:
    """A first run for processes that make its states themselves."""

    first: FirstRun
    begins: Mapping[Key, Tensor]
    """The numbers of its first state."""

    @staticmethod
    def of(first: FirstRun) -> _WithoutStates | None:
        """Return it without its states; ``None`` if no other process could make them."""
        if not first.eager.begins_anew:
            return None
        return _WithoutStates(replace(first, eager=replace(first.eager, starts=())), first.eager.starts[0].numbers())

    def begun_by(self, visit: Visit, phase: Phase) -> FirstRun | None:
        """Return it with the states that another process has made; ``None`` if they are not the same."""
        if visit.start is None or not visit.start.is_same(self.begins):
            return None
        starts = visit.start.varied() if phase == "train" else (visit.start,)
        return replace(self.first, eager=replace(self.first.eager, starts=starts))


@dataclass(frozen=True)
class SharedRuns:
    """The uncompiled runs of a phase, of which the first is known."""

    runs: UncompiledRuns
    first: FirstRun
    waits: bool
    """Whether no rung may begin before the rest is known."""
    exchange: Exchange | None
    """Where the rest is found or left; ``None`` if this process makes its own."""

    @staticmethod
    def begin(runs: UncompiledRuns, exchange: Exchange, *, defers: bool) -> SharedRuns:
        """Make the first run, or take it from the process that does; one that ``defers`` is not the first to make it
        while another may.
        """
        visit, begin = cache(runs.visit), cache(runs.begin)
        if defers:
            visit()
        name = f"{runs.phase}: first run"
        if not runs.each_makes_states:
            first, is_own = exchange.obtain(name, begin, visit)
            first = first if is_own else replace(first, eager=near_device(first.eager, runs.program.device))
            return SharedRuns(runs, first, is_own or visit().loses_bits, exchange)
        handed, is_own = exchange.obtain(name, lambda: _WithoutStates.of(begin()), visit)
        if handed is None:
            return SharedRuns(runs, begin(), waits=is_own, exchange=None)
        taken = None if is_own else handed.begun_by(visit(), runs.phase)
        if not is_own and taken is None:
            return SharedRuns(runs, begin(), waits=False, exchange=None)
        return SharedRuns(runs, taken or begin(), is_own or visit().loses_bits, exchange)

    def complete(self) -> Baseline:
        """Return the baseline that this process or another one makes of the first run; its own where another first run
        could not be handed on.
        """
        if self.exchange is None:
            torch.cuda.empty_cache()  # what a rung took and has let go of, other processes on the device may need
            return self.runs.complete(self.first)
        (name, baseline), is_own = self.exchange.obtain(f"{self.runs.phase}: baseline", self._make)
        if name != self.first.name:
            return self.runs.complete(self.first)
        if not baseline.hidden_by_tf32:
            return replace(baseline, eager=self.first.eager)
        if not baseline.eager.starts:
            return replace(baseline, eager=replace(baseline.eager, starts=self.first.eager.starts))
        return baseline if is_own else replace(baseline, eager=near_device(baseline.eager, baseline.device))

    def _make(self) -> tuple[str, Baseline]:
        made = self.runs.complete(self.first)
        if not made.hidden_by_tf32:
            eager = self.first.eager.without_results()
        else:
            eager = replace(made.eager, starts=()) if self.runs.each_makes_states else made.eager
        return self.first.name, replace(made, eager=eager)
