"""Lets ranks climb together: they exchange values, and try work together that may fail on some of them.

A compiler that raises on one rank leaves the others in a collective that it never joins. Each rank therefore tells
its outcome past the group, through the group's store. A rank that failed waits a while for the others; if they do not
come, it leaves the group: over gloo that frees the others, over NCCL they are freed by aborting it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

import torch.distributed as dist

from service.compilation.instruments.text import first_line
from service.compilation.program import Parts
from service.compilation.verdicts import Finding
from service.jobs.spec.compile import Phase
from service.parallel import distributed
from service.parallel.boundary import StepBoundary
from service.torch_internals.table import internal

Result = TypeVar("Result")
WELL, FAILED, STUCK = "well", "failed", "stuck"
DECISION, STAYED, LEFT = "decision", "stayed", "left"


@dataclass(frozen=True)
class WaitLimits:
    """How long a rank that has ended waits for the others, in seconds."""

    failed_s: float = 20.0
    """One that failed waits at least so long, or as long as its own run took: on a busy machine that is longer, and the
    others may still be compiling before they miss it.
    """
    done_s: float = 480.0
    """One that succeeded waits less than the timeout of collectives, which would end the job."""
    poll_s: float = 0.2
    """The pause between two looks at the store."""


LIMITS = WaitLimits()


class GroupLostError(Exception):
    """The group was left: some ranks failed, or did not come, while others waited. ``problems`` has the problem of
    each rank.
    """

    def __init__(self, problems: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items()))
        self.problems = problems

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(Finding("fail_error", f"rank {rank}: {problem}") for rank, problem in self.problems.items())


def slowest(seconds: float) -> float:
    """Return the largest of the ranks' durations, the same on every rank."""
    return float(max(distributed.gather(seconds)))


def any_rank(flag: bool) -> bool:
    """Return whether a condition holds on any rank."""
    return any(distributed.gather(flag))


def collective_attempt(
    run: Callable[[], Result], problem: Callable[[Result], str], limits: WaitLimits = LIMITS
) -> tuple[Result, list[str]]:
    """Let every rank ``run`` work with collectives that may fail on one rank; ``problem`` tells the fault of a result,
    empty without one. Return this rank's result, and the problems of all, by rank.

    All ranks have ended it, with or without success, when this returns. If they cannot, the group is left, and
    :class:`GroupLostError` names the ranks at fault: from then on each rank is alone.
    """
    if distributed.rank_and_size()[1] == 1:
        result = run()
        return result, [problem(result)]
    group_attempt = _GroupAttempt.of_all(limits)
    with _abort_waits_once_left(group_attempt):
        result = run()
    try:
        group_attempt.publish_outcome(problem(result))
        problems, missed = group_attempt.wait_for_all()
    except RuntimeError as error:
        problems, missed = [], {group_attempt.rank: f"the other ranks are gone ({first_line(str(error))})"}
    if missed:
        distributed.abandon()
        raise GroupLostError(missed)
    return result, problems


@dataclass(frozen=True)
class _GroupAttempt:
    """One attempt, in the group's store: the outcome of each rank, and the decision."""

    store: Any
    rank: int
    world: int
    limits: WaitLimits
    started: float

    @staticmethod
    def of_all(limits: WaitLimits) -> _GroupAttempt:
        # All begin together: one that comes late must not use up the time that others wait after their end.
        name = distributed.gather(uuid4().hex)[0]
        whole = internal("torch.distributed.distributed_c10d._get_default_store")()
        store = dist.distributed_c10d.PrefixStore(f"attempt/{name}", whole)
        return _GroupAttempt(store, *distributed.rank_and_size(), limits, time.monotonic())

    def publish_outcome(self, problem: str) -> None:
        """Tell how this rank ended: ``STUCK`` if others had failed before it did."""
        late = any(state == FAILED for state, _ in self.read_outcomes().values())
        state = WELL if not problem else STUCK if late or self.is_left() else FAILED
        self.store.set(str(self.rank), f"{state} {problem}")

    def read_outcomes(self) -> dict[int, tuple[str, str]]:
        """Return the state and the problem of each rank that has told them."""
        present = [rank for rank in range(self.world) if self.store.check([str(rank)])]
        parts = {rank: self.store.get(str(rank)).decode().partition(" ") for rank in present}
        return {rank: (state, problem) for rank, (state, _, problem) in parts.items()}

    def wait_for_all(self) -> tuple[list[str], dict[int, str]]:
        """Return what each rank has told once all have; if some do not come, leave, and return the ranks to blame."""
        began, limits = time.monotonic(), self.limits
        failed_s = max(limits.failed_s, began - self.started)
        while len(told := self.read_outcomes()) < self.world and not self.is_left():
            limit = failed_s if any(state != WELL for state, _ in told.values()) else limits.done_s
            if time.monotonic() - began > limit:
                break
            time.sleep(limits.poll_s)
        if self._decide(STAYED if len(told) == self.world else LEFT) == STAYED:
            # Where another rank has seen all outcomes and decided, this one finds them too.
            whole = told if len(told) == self.world else self.read_outcomes()
            return [whole[rank][1] for rank in range(self.world)], {}
        blamed = {rank: problem for rank, (state, problem) in told.items() if state == FAILED}
        absent = [rank for rank in range(self.world) if rank not in told]
        late = f"did not end within {limits.done_s:.0f} s of the others"
        return [], blamed or dict.fromkeys(absent or [self.rank], late)

    def is_left(self) -> bool:
        return bool(self.store.check([DECISION])) and self.store.get(DECISION).decode() == LEFT

    def _decide(self, wish: str) -> str:
        """Return the wish of the rank that came first: all stay, or all leave."""
        decided: str = self.store.compare_set(DECISION, "", wish).decode()
        return decided


@contextmanager
def _abort_waits_once_left(group_attempt: _GroupAttempt) -> Iterator[None]:
    """Abort, within, this rank's waits over NCCL as soon as another rank has left."""
    if not distributed.can_abort():
        yield
        return
    over = Event()

    def watch() -> None:
        while not over.wait(group_attempt.limits.poll_s):
            if group_attempt.is_left():
                distributed.abandon()
                return

    watcher = Thread(target=watch, name="group watcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@runtime_checkable
class Separable(Protocol):
    """A program whose ranks run different modules."""

    def alone(self, parts: Parts, boundary: StepBoundary, phase: Phase) -> None:
        """Run this rank's modules, and their backwards in training, without the other ranks; raises their errors."""
