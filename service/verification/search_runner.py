"""Runs one search for each instance that bounds left open, and reports its progress.

The trees of searches are published, as far as a job has room.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import inf, isfinite

import torch

from service.bounds.exact_forms import Ends, Plane, keeps_to, may_keep
from service.bounds.network import Network, prepare
from service.bounds.progress import OutOfTimeError
from service.formats.vnnlib import Disjunct, Halfspace, Query, contradict
from service.jobs.events import BoundsRow
from service.jobs.runtime import Reporter, RunContext
from service.jobs.spec.verify import SECONDS, SECONDS_OF_BOUNDS
from service.parallel.local_copy import local_copy
from service.verification.bab.decision import Decision, Technique
from service.verification.bab.driver import DecisionProgress, decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import CPU
from service.verification.bab.split_tree import SplitRecord
from service.verification.counterexamples import CounterexampleChecker
from service.verification.progress import PhaseTimes
from service.verification.properties.queried import Queried
from service.verification.task import Task, method_of
from service.verification.verdict import Verdict

MOST_NODES = 400
"""Domains of one search that its tree shows; the others are counted."""
MOST_REPORTED = 100_000
"""Domains of all trees that a rank reports of one model, at some 50 bytes each."""


@dataclass(eq=False)
class TreeReports:
    """The trees of this rank's searches, which ``ranks`` share; ``left`` is how many domains may still be reported."""

    report: Reporter
    ranks: int
    left: int = MOST_REPORTED

    def room(self) -> SplitRecord:
        """Return the record for the splits of a verdict's searches; none once there is no room left."""
        return SplitRecord(MOST_NODES if self.left > 0 else 0)

    def tell(self, instance: int, progress: DecisionProgress, record: SplitRecord) -> None:
        """Report the splits so far, if there are any and there is room."""
        if self.left <= 0 or not (searches := record.as_list()):
            return
        self.left -= sum(len(search["state"]) for search in searches)
        if self.left <= 0:
            self.report.log("the trees of later searches are not recorded: those so far take all of their room")
        found = {"instance": instance, "domains": progress.domains, "seconds": progress.seconds, "ranks": self.ranks}
        self.report.tree({**found, "searches": searches})


MOST_INPUTS = 64
"""Most inputs of a model for which rational arithmetic is tried."""
OF_CONTRADICTIONS = 0.1
"""The share of the time in which contradictions within a query are looked for."""
EVERY_S = 0.5
"""The time between two reports of one search."""
FIRST_TREE_S = 2.0
"""Seconds until the tree of a search is first reported; it is reported again whenever the time has doubled, and at
the end.
"""


ENDED_EARLY = " before the bounds of hidden values were optimised to the end, as alpha-crown does"


class StoppedError(Exception):
    """The attempt was asked to end in the middle of a search."""


class _SpentError(Exception):
    """A search has bounded its most domains."""


@dataclass(frozen=True, eq=False)
class SearchRunner:
    """The searches of this rank."""

    task: Task
    context: RunContext
    clock: PhaseTimes
    checker: CounterexampleChecker
    trees: TreeReports = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trees", TreeReports(self.context.report, self.task.search_group.axis.size))

    def wants(self, row: BoundsRow) -> bool:
        """Return whether a row of bounds leaves something to search."""
        asked, spec = self.task.asked, self.task.spec
        if row.verdict != Verdict.UNKNOWN.value:
            return False
        return isinstance(asked, Queried) or (spec.method == "beta-crown" and self._query(row) is not None)

    def decided(self, row: BoundsRow) -> BoundsRow:
        """Return the row with the result of a search in the seconds that its bounds have left. Raises
        :class:`StoppedError`.
        """
        started = time.monotonic()
        found = self._decide_row(row)
        return replace(found, seconds=row.seconds + time.monotonic() - started)

    def _decide_row(self, row: BoundsRow) -> BoundsRow:
        query, limit = self._query(row), self.limit(row.instance) - row.seconds
        assert query is not None
        if self.task.anywhere(limit <= 0):
            return self._timeout(row)
        # Ranks that decide together must look at the same cases.
        deadline = time.monotonic() + OF_CONTRADICTIONS * limit if self.task.is_alone else inf
        possible, note = _possible(query, deadline)
        row = replace(row, note="; ".join(each for each in (row.note, note) if each) or None)
        if not possible.disjuncts:
            return replace(row, verdict=Verdict.VERIFIED.value, decided_by=BY_QUERY, reason=None)
        try:
            decision, left, spent = self._search_instance(row.instance, possible, limit)
        except Exception as error:
            if not self.task.survives(error):
                raise
            return replace(row, reason=str(self.task.memory.shortage("the search", self.task.device, error)))
        self.clock.seconds["attack"] += decision.attacking
        self.clock.seconds["search"] += decision.seconds - decision.attacking
        if decision.domains:
            self._report(row.instance, DecisionProgress(decision.domains, left, decision.bound, decision.seconds))
        found = _enter_results(decision, row)
        if decision.verdict is Verdict.VERIFIED and decision.visited is not None:
            self.task.visited[row.instance] = decision.visited
        if decision.verdict is not Verdict.UNKNOWN:
            return replace(found, verdict=decision.verdict.value, reason=None)
        if decision.seconds >= limit and decision.shortage is None:
            return self._timeout(found, ENDED_EARLY if decision.is_hurried else "")
        short = None if decision.shortage is None else str(decision.shortage)
        reason = short or spent or "what is left open cannot be split"
        return replace(found, verdict=decision.verdict.value, reason=reason)

    def _is_exact(self, disjuncts: Sequence[Disjunct], deadline: float) -> bool:
        """Return whether rational arithmetic proves until the deadline that nothing satisfies one of the disjuncts.
        If a strict bound is attained, no rounded bound can prove it.
        """
        task = self.task
        if not task.engine.is_alone or len(disjuncts[0].lower) > MOST_INPUTS:
            return False
        cases: dict[Ends, list[Sequence[Plane]]] = defaultdict(list)
        for each in disjuncts:
            box = tuple(Fraction(end) for end in each.lower), tuple(Fraction(end) for end in each.upper)
            cases[box].append(_planes(each))
        plain = replace(task.engine.network, graph=task.engine.network.graph.to(CPU, torch.float64))
        try:
            return all(may_keep(plain, box, deadline) for box in cases) and all(
                keeps_to(self._exact_network, box, planes, deadline) for box, planes in cases.items()
            )
        except OutOfTimeError:
            return False

    @cached_property
    def _exact_network(self) -> Network:
        """Return the network in float64 on the CPU, where rational arithmetic reads its numbers one by one."""
        return prepare(local_copy(self.checker.precise).cpu(), self.task.engine.network.graph.input.shape)

    def _timeout(self, row: BoundsRow, when: str = "") -> BoundsRow:
        return replace(row, verdict="timeout", reason=f"its {self.limit(row.instance):g} seconds were spent{when}")

    def _search_instance(self, instance: int, query: Query, limit: float) -> tuple[Decision, int, str | None]:
        """Return the decision, the number of open domains, and the part of the budget that ran out before the time."""
        budget, last = self.task.spec.budget, DecisionProgress(0, 1, -inf, 0.0)
        record = self.trees.room() if self.task.leads else SplitRecord()
        report = self._reporting(instance, record)
        model = replace(self._model, splits=record)

        def hear(progress: DecisionProgress) -> None:
            nonlocal last
            last = progress
            report(progress)

        try:
            method = method_of(self.task.spec)
            decision = decide(model, query, method, limit, hear, restarts=budget.restarts, exactly=self._is_exact)
        except _SpentError:
            self.trees.tell(instance, last, record)
            halted = Decision(Verdict.UNKNOWN, None, last.domains, last.seconds, last.bound, Technique.ACTIVATIONS)
            return halted, last.open, f"budget.domains: {budget.domains} were bounded"
        last = DecisionProgress(decision.domains, last.open, decision.bound, decision.seconds)
        self.trees.tell(instance, last, record)
        return decision, last.open if decision.verdict is Verdict.UNKNOWN else 0, None

    def limit(self, instance: int) -> float:
        """Return the seconds that the instance may take, from its bounds on."""
        own, given = self.task.asked.seconds(instance), self.task.spec.budget.seconds
        usual = SECONDS if self.task.spec.searches() else SECONDS_OF_BOUNDS
        return own if own is not None else given if given is not None else usual

    def _query(self, row: BoundsRow) -> Query | None:
        return self.task.asked.query(row.instance)

    @cached_property
    def _model(self) -> ModelUnderVerification:
        task, float64_module = self.task, self.checker.precise
        # A module of the arithmetic's type: a rigorous search attacks the function that it bounds.
        module = float64_module if task.engine.arithmetic.dtype is torch.float64 else task.module
        return ModelUnderVerification(
            task.engine.differentiable(module),
            task.engine,
            float64_module,
            task.runtime,
            task.engine.arithmetic.dtype,
            task.search_group,
            task.options,
        )

    def _reporting(self, instance: int, record: SplitRecord) -> Callable[[DecisionProgress], None]:
        last, next_tree = time.monotonic(), FIRST_TREE_S

        def report(progress: DecisionProgress) -> None:
            nonlocal last, next_tree
            if self.task.anywhere(self.context.should_stop()):
                raise StoppedError
            if time.monotonic() - last >= EVERY_S:
                last = time.monotonic()
                self._report(instance, progress)
            if progress.seconds >= next_tree:
                next_tree = 2 * progress.seconds
                self.trees.tell(instance, progress, record)
            if progress.domains >= self.task.spec.budget.domains and progress.open:
                raise _SpentError

        return report

    def _report(self, instance: int, progress: DecisionProgress) -> None:
        if not self.task.leads:
            return
        self.context.report.search(
            {
                "instance": instance,
                "domains": progress.domains,
                "open": progress.open,
                "bound": progress.bound if isfinite(progress.bound) else None,
                "seconds": progress.seconds,
            }
        )


def _enter_results(decision: Decision, row: BoundsRow) -> BoundsRow:
    """Return the row with the search's results, except the verdict and its reason."""
    known = [margin for margin in (row.margin, decision.bound) if margin is not None and isfinite(margin)]
    return replace(
        row,
        margin=max(known, default=None),
        decided_by=None if decision.verdict is Verdict.UNKNOWN else decision.technique.value,
        counterexample=None if decision.counterexample is None else list(decision.counterexample),
        domains=max(decision.domains, 1),
    )


BY_QUERY = "the query"
"""What decides a query whose conditions on outputs contradict each other."""


def _possible(query: Query, deadline: float) -> tuple[Query, str | None]:
    """Return the query without the disjuncts that no outputs satisfy, and a note if there are any; those that are not
    reached by the deadline stay.
    """

    def is_possible(halfspaces: Sequence[Halfspace]) -> bool:
        return len(halfspaces) < 2 or time.monotonic() > deadline or not contradict(halfspaces)

    possible = tuple(each for each in query.disjuncts if is_possible(each.halfspaces))
    if len(possible) == len(query.disjuncts):
        return query, None
    if not possible:
        note = "no outputs satisfy the query's conditions, which contradict each other: it holds for any network"
        return replace(query, disjuncts=()), note
    count = len(query.disjuncts) - len(possible)
    note = f"{count} of the query's {len(query.disjuncts)} cases contradict themselves, and hold for any network"
    return replace(query, disjuncts=possible), note


def _planes(disjunct: Disjunct) -> list[Plane]:
    return [
        Plane(
            tuple((index, Fraction(factor)) for index, factor in halfspace.coefficients),
            Fraction(halfspace.threshold),
            attained=halfspace.strict,
        )
        for halfspace in disjunct.halfspaces
    ]
