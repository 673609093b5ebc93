"""Compares the calls of compiled modules with those that a gate's compile check saw."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.compiler import set_stance

from service.jobs.spec.compile import Phase
from service.parallel.boundary import Invocation, StepBoundary
from service.parallel.boundary.lifetimes import CallCounter
from service.parallel.boundary.watch import intercepted

_SHOWN = 3
"""The most known ways of calling a module that a sentence lists."""
_UNTOLD = "of any type"
"""What stands for the types of tensors in the report of an older version, which does not tell them."""


@dataclass(frozen=True)
class Pattern:
    """A phase's calls: the ways in which each module was called, and how often in a step, at least and at most."""

    ways: frozenset[tuple[str, ...]]
    times: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Pattern:
        """Read the rows ``invocations`` of a rung in a compile report; a fraction of a call is one in some steps."""
        per_step: dict[str, float] = defaultdict(float)
        for row in rows:
            per_step[row["module"]] += row["per_step"]
        times = {name: (math.floor(count), math.ceil(count)) for name, count in per_step.items()}
        return cls(frozenset(_way(**row) for row in rows), times)

    def unlike(self, call: Invocation, count: int) -> str:
        """Say what the check has not seen of a call, the ``count``-th of its module in a step; empty if nothing."""
        way = _way(call.module, call.phase, grad=call.grad, thread=call.thread, shape=call.shape, dtype=call.dtype)
        if not self.ways & {way, (*way[:-1], _UNTOLD)}:
            known = [" ".join(each[1:]) for each in sorted(self.ways) if each[0] == call.module]
            seen = "; ".join(known[:_SHOWN]) + ("; …" if len(known) > _SHOWN else "") or "no call of it"
            return f"{call.module} is called as {' '.join(way[1:])}, and the check saw {seen}"
        most = self.times[call.module][1]
        return f"{call.module} is called {count} times in a step, and in the check {most} times" if count > most else ""

    def lacking(self, counts: Mapping[str, int]) -> str:
        """Say which module a step has called less often than in the check; empty if none."""
        for name, (least, _) in self.times.items():
            if counts.get(name, 0) < least:
                return f"{name} is called {counts.get(name, 0)} times in a step, and in the check {least} times"
        return ""


def _way(
    module: str, phase: str, *, grad: bool, thread: str, shape: str, dtype: str = _UNTOLD, **_: object
) -> tuple[str, ...]:
    """Return a way of calling in words. Threads that Python did not start, such as those of backwards, are alike."""
    own = "a thread of torch" if thread.startswith("Dummy-") else thread
    return module, f"{phase}, gradients {'on' if grad else 'off'},", f"in {own}, with", shape, dtype


class CheckedCalls:
    """Lets compiled units be called as the gate's check saw them; a phase with any other call goes on in eager.

    ``unlike`` says for each such phase what was other. Phases without a pattern are eager from the start.
    """

    def __init__(
        self, boundary: StepBoundary, patterns: Mapping[Phase, Pattern], tell: Callable[[Phase, str], None]
    ) -> None:
        self._boundary, self._patterns, self._tell = boundary, patterns, tell
        self._phase: Phase | None = None
        self._step = -1
        self._counts: Counter[str] = Counter()
        self._counter, self._watched = CallCounter(), ExitStack()
        self.unlike: dict[Phase, str] = {}
        self.eager = 0
        """Calls of units in eager, in phases that the gate has opened."""

    def watch(self, name: str, unit: nn.Module) -> None:
        """Watch the calls of a compiled unit from now on."""

        def around(compiled: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if self._opens(self._counter.add(name, unit, (arguments, named))):
                return compiled(*arguments, **named)
            self.eager += self._phase in self._patterns
            with set_stance("force_eager"):
                return compiled(*arguments, **named)

        self._watched.enter_context(intercepted(unit, around))

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Run whole steps of a phase."""
        self._phase = phase
        yield
        self._end_step()
        self._phase = None

    def _opens(self, call: Invocation) -> bool:
        if self._boundary.step != self._step:
            self._end_step()
        pattern = self._pattern()
        if pattern is None or self._phase is None:
            return False
        self._counts[call.module] += 1
        if why := pattern.unlike(call, self._counts[call.module]):
            self._close(self._phase, why)
        return not why

    def _pattern(self) -> Pattern | None:
        return None if self._phase is None or self._phase in self.unlike else self._patterns.get(self._phase)

    def _end_step(self) -> None:
        """Look whether a step that ends has made all its calls; one that called nothing is none."""
        pattern = self._pattern()
        if pattern is not None and self._phase is not None and self._counts and (why := pattern.lacking(self._counts)):
            self._close(self._phase, why)
        self._counts.clear()
        self._step = self._boundary.step

    def _close(self, phase: Phase, why: str) -> None:
        self.unlike[phase] = why
        self._tell(phase, why)
