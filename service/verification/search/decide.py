"""Deciding a query: every goal is attacked first; what withstands is searched, by its inputs or its activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch

from service.bounds.memory import MemoryShortageError, make_room
from service.formats.vnnlib import Query
from service.verification.certify import Verdict
from service.verification.search.activations import split_activations
from service.verification.search.attack import RESTARTS, attack
from service.verification.search.bounder import WEAK
from service.verification.search.decision import Decision, Finding, Means, Moment, Search
from service.verification.search.goal import Goal, goals
from service.verification.search.inputs import FEW_INPUTS, split_inputs
from service.verification.search.subject import Subject
from service.verification.search.whole import bound_whole, has_activations

ATTACKING = 0.2
"""Share of the time in which the attack must be over; on small networks it takes much less."""
SEVERAL_INPUTS, LOOKING = 16, 0.1
"""Half of a box of more inputs is hardly easier than the box: activations come first, for this share of the time."""
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
    """Within about ``limit`` seconds and the subject's memory; *unknown* is the answer when they did not suffice.

    The attack has ``restarts`` starts, and at least two for each disjunct; with 0 there is none. What ``progress``
    raises ends the search.
    """
    started = time.monotonic()
    asked = [_allowing(subject, goal, method) for goal in goals(query, subject.device)]
    run = _Run(subject, asked, method, started, limit, progress)
    found = run.attacked(restarts) if restarts else None
    return run.searched() if found is None else run.end(Verdict.FALSIFIED, Means.ATTACK, found)


def _allowing(subject: Subject, goal: Goal, method: str) -> Goal:
    """The goal with thresholds that make up for coefficients which are rounded, in float64 or in the bounds' type."""
    unbounded = torch.full_like(goal.rows[0], inf)
    if not bool(goal.lost(subject.dtype, unbounded).any()):
        return goal
    bounds = subject.output_bounds(goal.box(subject.dtype), method if method in WEAK else "crown")
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs()).double().nan_to_num(nan=inf)
    return goal.allowing(goal.lost(subject.dtype, reach))


def means_for(goal: Goal) -> Means:
    """Halving an input gains nothing where there are many; activations are few that matter."""
    few = _free(goal) <= FEW_INPUTS and goal.distance is None  # halves of a ball are none
    return Means.INPUTS if few else Means.ACTIVATIONS


def _free(goal: Goal) -> int:
    return int((goal.upper > goal.lower).sum())


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
    shortage: MemoryShortageError | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def attacked(self, restarts: int) -> tuple[float, ...] | None:
        """A counterexample to any of the goals; each rank of a crew starts elsewhere."""
        crew, deadline = self.subject.crew, self.started + ATTACKING * self.limit
        for goal in self.goals:
            found = crew.first(self._attacked(goal, deadline, restarts), self.subject.device)
            self.attacking = self.seconds
            if found is not None:
                return found
        return None

    def _attacked(self, goal: Goal, deadline: float, restarts: int) -> tuple[float, ...] | None:
        """An attack proves nothing: without the memory for it there is none."""
        try:
            return attack(self.subject, goal, deadline, self.subject.crew.axis.rank, restarts)
        except Exception as error:
            if not self.subject.survives(error):
                raise
        make_room(self.subject.device)
        return None

    def searched(self) -> Decision:
        """All goals, one after the other; the first counterexample ends it."""
        verdict, means = Verdict.VERIFIED, Means.ATTACK
        for goal in self.goals:
            finding, by = self._decided(goal)
            if finding.verdict is Verdict.FALSIFIED:
                return self.end(Verdict.FALSIFIED, by, finding.counterexample)
            if verdict is Verdict.VERIFIED or finding.verdict is Verdict.UNKNOWN:
                verdict, means = finding.verdict, by
        return self.end(verdict, means)

    def _decided(self, goal: Goal) -> tuple[Finding, Means]:
        means, known = means_for(goal), -inf
        if means is Means.INPUTS and _free(goal) > SEVERAL_INPUTS:
            looked = self._search(goal, Means.ACTIVATIONS, LOOKING, known)
            known = looked.bound
            if looked.verdict is not Verdict.UNKNOWN:
                return self._kept(looked), Means.ACTIVATIONS
        return self._kept(self._search(goal, means, 1.0, known)), means

    def _kept(self, finding: Finding) -> Finding:
        self.bounds.append(finding.bound)
        return finding

    def _search(self, goal: Goal, means: Means, share: float, known: float) -> Finding:
        """In a share of the time that is left; ``known`` bounds the margin from below."""

        def heard(moment: Moment) -> None:
            least = self._least([*self.bounds, max(known, moment.bound)])
            self.progress(Progress(self.domains + moment.domains, moment.open, least, self.seconds))

        whole = means is Means.ACTIVATIONS and not has_activations(self.subject)
        search = bound_whole if whole else SEARCHES[means]
        now = time.monotonic()
        try:
            finding = search(self.subject, goal, self.method, now + share * (self.started + self.limit - now), heard)
        except Exception as error:
            agreed = isinstance(error, MemoryShortageError) or self.subject.crew.axis.size == 1
            if not agreed or not self.subject.survives(error):
                raise
            shortage = self.subject.memory.shortage("the search", self.subject.device, error)
            finding = Finding(Verdict.UNKNOWN, None, 0, -inf, shortage)
        self.domains += finding.domains
        self.shortage = finding.shortage or self.shortage
        return replace(finding, bound=max(known, finding.bound))

    def _least(self, bounds: Sequence[float]) -> float:
        """Over all goals: nothing is known of those whose turn has not come."""
        return min(bounds, default=inf) if len(bounds) == len(self.goals) else -inf

    def end(self, verdict: Verdict, means: Means, counterexample: tuple[float, ...] | None = None) -> Decision:
        least = self._least(self.bounds)
        shortage = self.shortage if verdict is Verdict.UNKNOWN else None
        return Decision(verdict, counterexample, self.domains, self.seconds, least, means, self.attacking, shortage)
