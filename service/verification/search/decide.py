"""Deciding a query: every goal is attacked first; what withstands is searched, by its inputs or its activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from service.jobs.vnnlib import Query
from service.verification.certify import Verdict
from service.verification.search.activations import split_activations
from service.verification.search.attack import RESTARTS, attack
from service.verification.search.decision import Decision, Finding, Means, Moment, Search
from service.verification.search.goal import Goal, goals
from service.verification.search.inputs import FEW_INPUTS, split_inputs
from service.verification.search.subject import Subject
from service.verification.search.whole import bound_whole, has_activations

ATTACKING = 0.2
"""Share of the time in which the attack must be over; on small networks it takes much less."""
SEARCHES: dict[Means, Search] = {Means.INPUTS: split_inputs, Means.ACTIVATIONS: split_activations}


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
    run = _Run(subject, goals(query, subject.device), method, time.monotonic(), limit, progress)
    found = run.attacked(restarts) if restarts else None
    return run.searched() if found is None else run.end(Verdict.FALSIFIED, Means.ATTACK, found)


def means_for(goal: Goal) -> Means:
    """Halving an input gains nothing where there are many; activations are few that matter."""
    free = int((goal.upper > goal.lower).sum())
    few = free <= FEW_INPUTS and goal.distance is None  # halves of a ball are none
    return Means.INPUTS if few else Means.ACTIVATIONS


@dataclass(eq=False)
class _Run:
    """What adds up over the goals."""

    subject: Subject
    goals: Sequence[Goal]
    method: str
    started: float
    limit: float
    progress: Callable[[Progress], None]
    domains: int = 0
    bounds: list[float] = field(default_factory=list)
    attacking: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def attacked(self, restarts: int) -> tuple[float, ...] | None:
        """A counterexample to any of the goals; each rank of a crew starts elsewhere."""
        crew, deadline = self.subject.crew, self.started + ATTACKING * self.limit
        for goal in self.goals:
            found = attack(self.subject, goal, deadline, crew.axis.rank, restarts)
            found = crew.first(found, self.subject.device)
            self.attacking = self.seconds
            if found is not None:
                return found
        return None

    def searched(self) -> Decision:
        """All goals, one after the other; the first counterexample ends it."""
        verdict, means = Verdict.VERIFIED, Means.ATTACK
        for goal in self.goals:
            finding = self._search(goal, means_for(goal))
            if finding.verdict is Verdict.FALSIFIED:
                return self.end(Verdict.FALSIFIED, means_for(goal), finding.counterexample)
            if verdict is Verdict.VERIFIED or finding.verdict is Verdict.UNKNOWN:
                verdict, means = finding.verdict, means_for(goal)
        return self.end(verdict, means)

    def _search(self, goal: Goal, means: Means) -> Finding:
        whole = means is Means.ACTIVATIONS and not has_activations(self.subject)
        search = bound_whole if whole else SEARCHES[means]
        finding = search(self.subject, goal, self.method, self.started + self.limit, self._heard)
        self.domains += finding.domains
        self.bounds.append(finding.bound)
        return finding

    def _heard(self, moment: Moment) -> None:
        least = self._least([*self.bounds, moment.bound])
        self.progress(Progress(self.domains + moment.domains, moment.open, least, self.seconds))

    def _least(self, bounds: Sequence[float]) -> float:
        """Over all goals: nothing is known of those whose turn has not come."""
        return min(bounds, default=inf) if len(bounds) == len(self.goals) else -inf

    def end(self, verdict: Verdict, means: Means, counterexample: tuple[float, ...] | None = None) -> Decision:
        least = self._least(self.bounds)
        return Decision(verdict, counterexample, self.domains, self.seconds, least, means, self.attacking)
