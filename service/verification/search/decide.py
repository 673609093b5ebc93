"""Deciding a query: every goal is attacked first; what withstands is searched, by its inputs or its activations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from service.jobs.vnnlib import Query
from service.verification.certify import Verdict
from service.verification.search.activations import split_activations
from service.verification.search.attack import RESTARTS, attack
from service.verification.search.decision import Decision, Finding, Means, Moment, Search
from service.verification.search.goal import Goal, goals
from service.verification.search.inputs import FEW_INPUTS, split_inputs
from service.verification.search.stages import split_in_stages
from service.verification.search.subject import Subject

ATTACKING = 0.2
"""Share of the time in which the attack must be over; on small networks it takes much less."""
SEARCHES: dict[Means, Search] = {Means.INPUTS: split_inputs, Means.ACTIVATIONS: split_activations}
IN_STAGES: dict[Means, Search] = {Means.INPUTS: split_inputs, Means.ACTIVATIONS: split_in_stages}


@dataclass(frozen=True)
class Progress:
    """A moment of a decision; ``seconds`` since it began, the rest as in :class:`Moment`."""

    domains: int
    open: int
    bound: float
    seconds: float


def decide(
    subject: Subject,
    query: Query,
    method: str,
    limit: float,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    restarts: int = RESTARTS,
) -> Decision:
    """Within about ``limit`` seconds; *unknown* is the answer when they did not suffice.

    The attack has ``restarts`` starts, and at least two for each disjunct; with 0 there is none. What ``progress``
    raises ends the search.
    """
    run = _Run(subject, method, time.monotonic(), limit, progress)
    every = goals(query, subject.device)
    for goal in every:
        found = _attacked(subject, goal, run.started + ATTACKING * limit, restarts) if restarts else None
        run.attacking = run.seconds
        if found is not None:
            return run.end(Verdict.FALSIFIED, Means.ATTACK, found)
    undecided: Means | None = None
    means = Means.ATTACK
    for goal in every:
        means = means_for(goal)
        finding = run.search(goal, means)
        if finding.verdict is Verdict.FALSIFIED:
            return run.end(Verdict.FALSIFIED, means, finding.counterexample)
        if finding.verdict is Verdict.UNKNOWN:
            undecided = means
    if undecided is not None:
        return run.end(Verdict.UNKNOWN, undecided)
    return run.end(Verdict.VERIFIED, means)


def _attacked(subject: Subject, goal: Goal, deadline: float, restarts: int) -> tuple[float, ...] | None:
    """Each rank of a crew starts elsewhere."""
    found = attack(subject, goal, deadline, subject.crew.axis.rank, restarts)
    return subject.crew.first(found, subject.device)


def means_for(goal: Goal) -> Means:
    """Halving an input gains nothing where there are many; activations are few that matter."""
    free = int((goal.upper > goal.lower).sum())
    few = free <= FEW_INPUTS and goal.distance is None  # halves of a ball are none
    return Means.INPUTS if few or Means.ACTIVATIONS not in SEARCHES else Means.ACTIVATIONS


@dataclass(eq=False)
class _Run:
    """What adds up over the goals."""

    subject: Subject
    method: str
    started: float
    limit: float
    progress: Callable[[Progress], None]
    domains: int = 0
    bound: float = field(default=inf)
    attacking: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def search(self, goal: Goal, means: Means) -> Finding:
        searches = SEARCHES if self.subject.staged is None else IN_STAGES
        finding = searches[means](self.subject, goal, self.method, self.started + self.limit, self._heard)
        self.domains += finding.domains
        self.bound = min(self.bound, finding.bound)
        return finding

    def _heard(self, moment: Moment) -> None:
        total, least = self.domains + moment.domains, min(self.bound, moment.bound)
        self.progress(Progress(total, moment.open, least, self.seconds))

    def end(self, verdict: Verdict, means: Means, counterexample: tuple[float, ...] | None = None) -> Decision:
        return Decision(verdict, counterexample, self.domains, self.seconds, self.bound, means, self.attacking)
