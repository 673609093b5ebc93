"""Measures how a training uses its model, in some of its steps, as metrics of the job."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from service.jobs.events import LONGEST_WORDS
from service.parallel.boundary import HeldResult, Invocation, Parts, StepWatch, parts_of
from service.training.setup import Training

CALLS, FORWARDS, REENTRIES, OUTLIVING = "calls", "forwards_per_micro_batch", "reentries", "outliving_results"
"""The metrics' names; after each come slashes with what it counts: ``calls/stage 0/train/8x64``."""
_MOST_WAYS = 40
"""The most modules, ways of calling them, or holders, that have a metric of their own in one step."""
_OTHERS = "others"
_RESTS = 100
"""A search for holders that took so long is followed by so many times its time without one."""


class UsageMetrics:
    """Watches every N-th step and reports its calls when it ends, and the results that outlive it a whole step later.

    An evaluation's calls of stages are counted in any case, and reported with it. The first rank of each pipeline stage
    reports metrics; every rank logs the first result that each holder keeps.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._report = training, training.context.report
        self._every = training.spec.counters.every
        self._is_first = training.mesh.dp.rank == 0 and training.mesh.tp.rank == 0
        self._parts: Parts = {
            f"stage {number} {name}".replace(",", " "): modules  # lists of metrics are separated by commas
            for number, stage in training.stages.items()
            for name, modules in parts_of(stage).items()
        }
        self._waiting: list[StepWatch] = []
        self._rests_until = 0.0
        self._logged: set[str] = set()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Begin the step after ``step`` finished ones at the boundary, and watch what runs within if it is due."""
        self._tell_outliving(step)
        boundary = self._training.boundary
        if not self._is_due(step):
            boundary.step_boundary()
            yield
            return
        watch = StepWatch(self._parts)
        self._waiting.append(watch)
        boundary.step_boundary(watch)
        with watch.over():
            yield
        self._tell(step + 1, self._metrics(watch))

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Count the calls of stages within, an evaluation after ``step`` steps, which is itself a step or more."""
        self._tell_outliving(step)
        before = Counter(self._training.boundary.invocations())
        yield
        self._tell_outliving(step)
        if self._every is not None:
            self._tell(step, _calls(Counter(self._training.boundary.invocations()) - before))

    def _is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0 and time.monotonic() >= self._rests_until

    def _metrics(self, watch: StepWatch) -> dict[str, float]:
        calls, reentries = Counter(watch.calls.counts()), Counter(watch.reentries.counts())
        known = (*self._training.boundary.modules, *self._parts)
        names = [name for name in known if _of(name, calls)][:_MOST_WAYS]
        micro = self._training.spec.micro_batches
        alike = {name: len(self._parts.get(name, ("one",))) for name in names}
        forwards = {name: _of(name, calls - reentries) / micro / alike[name] for name in names}
        return {
            **_calls(calls),
            **{f"{FORWARDS}/{name}": count for name, count in forwards.items()},
            **{f"{REENTRIES}/{name}": _of(name, reentries) for name in names},
        }

    def _tell_outliving(self, step: int) -> None:
        """Report what is alive of the results of a watched step, once another step has ended."""
        if not self._waiting or self._training.boundary.step <= self._waiting[0].step:
            return
        began = time.monotonic()
        held = self._waiting.pop(0).outliving()
        if held:  # only then was there a search
            now = time.monotonic()
            self._rests_until = now + _RESTS * (now - began)
        found: Counter[str] = Counter()
        for result in held:
            name = f"{OUTLIVING}/{result.origin.module}/{_plain_holder(result)}"
            if name not in found and name not in self._logged:
                self._report.log(f"rank {self._training.context.rank}: alive a whole step after its own: {result}")
            found[name] += 1
        self._logged |= found.keys()
        self._tell(step, {OUTLIVING: len(held), **_limited(found, OUTLIVING)})

    def _tell(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._is_first:
            self._report.metric(step, metrics)


def _of(name: str, calls: Mapping[Invocation, int]) -> int:
    return sum(count for call, count in calls.items() if call.module == name)


def _calls(calls: Mapping[Invocation, int]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for call, count in calls.items():
        shape = "+".join("x".join(map(str, each)) or "scalar" for each in call.shapes) or "none"
        found[f"{CALLS}/{call.module}/{call.phase}/{shape}"] += count
    return _limited(found, CALLS)


def _plain_holder(result: HeldResult) -> str:
    """Return the first holder, whose indices do not count."""
    holder = result.holders[0] if result.holders else "no Python object"
    return re.sub(r"\[[^\]]*\]", "[…]", holder).replace(",", "")


def _limited(found: Counter[str], key: str) -> dict[str, float]:
    """Return the most frequent under their own names, and the rest under one: a model with many shapes has few."""
    own = {name[:LONGEST_WORDS]: float(count) for name, count in found.most_common(_MOST_WAYS)}
    rest = found.total() - sum(own.values())
    return {**own, f"{key}/{_OTHERS}": rest} if rest else own
