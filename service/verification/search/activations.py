"""Branch and bound over activations (beta-CROWN, Wang et al., 2021): domains are sets of halfspaces of hidden values.

Every disjunct starts one domain, the whole box. Domains that are not proved wait in a pool; those with
the least margins are taken out in batches, split in two where that gains most, bounded on the device, and tried for
a counterexample where their bounds are attained. A domain that leaves only affine operators is a linear program.
Of a rigorous search the root's bounds and every margin are certified; no program or refinement proves anything there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from math import inf, isnan
from typing import TypeVar

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import MemoryShortageError
from service.bounds.parts import with_parts
from service.bounds.rigorous import RigorousAnalysis
from service.bounds.stages import StagedAnalysis
from service.verification.certify import Verdict
from service.verification.search.ascent import Climb
from service.verification.search.attack import descend, excess_of, inputs_at_once
from service.verification.search.bounding import Bounding
from service.verification.search.branching import Branching
from service.verification.search.certificates import Certificates, StageCertificates
from service.verification.search.crew import Standing
from service.verification.search.decision import Finding, Moment, Watcher
from service.verification.search.domains import Domains, Handed, Pool
from service.verification.search.given import CLIMB, GAIN, Given
from service.verification.search.goal import Goal
from service.verification.search.intermediate import optimised, wanted
from service.verification.search.programs import Programs, Solved
from service.verification.search.refining import after_relaxations, refined
from service.verification.search.root import Root, bounded
from service.verification.search.stage_walk import StageWalk
from service.verification.search.subject import Subject, worst_first
from service.verification.search.walk import Walk

FROM_SCRATCH, ONWARD = Climb(60, slopes=0.1), Climb(5, slopes=0.03)
"""Of whole boxes, and of halves, whose parameters begin where those of the whole were best."""
QUICK_SECONDS, QUICK_SHARE = 1.0, 0.05
"""A search that is not over after so long, or so much of its time, tightens what all its domains share, and again
whenever it has taken twice as long."""
OPTIMISING_SHARE = 0.6
"""What the first time may take, of the time that is left: it optimises relaxations and splits nothing."""
REFINING_SHARE = 0.5
"""What later times may take, of the time that is left; and no more than went by."""
CLOSED, LONGER = 0.25, 2
"""Where so large a share of the relaxations was no longer needed, the next time follows at once, and is longer."""
PROGRAM_SECONDS = 1.0
"""For linear programs in one round: others wait for its end."""
LARGEST_BATCH = 8192
TRIED = 16
"""Minimisers of a round from which a counterexample is sought by descent."""

T = TypeVar("T")
Counterexample = tuple[float, ...]
ROOTS, DOMAINS, PROGRAMS = "the bounds of whole boxes", "the search over activations", "linear programs"
"""Where memory may be short."""


def split_activations(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """A :class:`~service.verification.search.decision.Search`."""
    if not subject.rigorous:
        subject = replace(subject, network=with_parts(subject.network))
    root = bounded(subject, goal, method, deadline)
    return subject.together(ROOTS, lambda: _Search(subject, goal, deadline, watcher, root)).run()


def _bounding(subject: Subject, root: Root) -> Bounding:
    if subject.staged is not None:
        walk: Walk = StageWalk(subject.staged, root.box, root.bounds, root.question)
    else:
        walk = Walk(subject.network, root.box, root.bounds, root.question)
    return Bounding(walk, subject.memory)


def _certificates(subject: Subject, bounding: Bounding, root: Root) -> Certificates | None:
    if not subject.rigorous:
        return None
    if isinstance(root.analysis, StagedAnalysis):
        assert isinstance(root.analysis.analysis, RigorousAnalysis)
        return StageCertificates(bounding, root.analysis.analysis, root.analysis.staged.line)
    assert isinstance(root.analysis, RigorousAnalysis)
    return Certificates(bounding, root.analysis)


class _Search:
    """The open domains of one goal."""

    def __init__(self, subject: Subject, goal: Goal, deadline: float, watcher: Watcher, root: Root) -> None:
        self.subject, self.goal, self.deadline, self.watcher = subject, goal, deadline, watcher
        self.bounding = _bounding(subject, root)
        self.branching = Branching(self.bounding, subject.heuristics.activations)
        self.certificates = _certificates(subject, self.bounding, root)
        self.programs, self.at_once = Programs(subject, goal), inputs_at_once(subject)
        self.margins = root.margins
        self.roots = self.bounding.roots(self.margins)
        self.pool = Pool(self.roots, subject.memory)
        self.domains, self.bound = 0, -inf
        self.shortage: MemoryShortageError | None = None
        self.is_over = False
        self.proved, self.stuck = inf, inf
        self.pace, self.most = 0.0, LARGEST_BATCH
        self.first, self.onward = (climb.within(subject.effort, deadline) for climb in (FROM_SCRATCH, ONWARD))
        self.started = now = time.monotonic()
        self.patience = now + min(QUICK_SECONDS, QUICK_SHARE * (deadline - now))
        self.shared, self.is_optimised = root.bounds, False
        self.question = root.question

    @torch.no_grad()
    def run(self) -> Finding:
        crew, device, found = self.subject.crew, self.subject.device, None
        self._if_possible(lambda: self._settle(self.roots, self.first), losing=ROOTS)
        self._if_possible(lambda: self.bounding.calibrate(self.roots))
        if not crew.is_first:  # every rank has bounded the roots; one searches on from there
            self.pool, self.domains = Pool(self.roots, self.subject.memory), 0
        while True:
            stock = Handed(self.pool, self.roots)
            meeting = crew.meet(self._standing(stock.width), found, device)
            everyone = meeting.all
            self._report(everyone)
            if meeting.found is not None:
                return Finding(Verdict.FALSIFIED, meeting.found, everyone.domains, self.bound)
            if not everyone.open or everyone.late:
                decided = not everyone.open and not everyone.stuck
                verdict = Verdict.VERIFIED if decided else Verdict.UNKNOWN
                return Finding(verdict, None, everyone.domains, self.bound, self.shortage)
            for rows in crew.hand_over(meeting, stock, device):
                self._if_possible(partial(stock.receive, rows), losing=DOMAINS)
            if everyone.tired and self.certificates is None and self.bounding.numbering.is_whole:
                self._if_possible(self._refine_in_time)
            found = self._round() if len(self.pool) else None

    def _standing(self, width: int) -> Standing:
        return Standing(
            len(self.pool),
            self.domains,
            min(self.pool.bound, self.stuck, self.proved),
            stuck=self.stuck < inf or self.is_over,
            late=self.subject.late(self.deadline) or self.is_over,
            tired=time.monotonic() > self.patience,
            width=width,
        )

    def _round(self) -> Counterexample | None:
        started = time.monotonic()
        left = max(self.deadline - started, 0)
        count, parents = 1, None
        try:
            count = min(self.most, self.bounding.capacity // 2, int(left / self.pace) if self.pace else 1)
            count = self.bounding.numbering.least(max(1, count))
            parents = self.pool.take(count)
            count = len(parents)
            return self._worked_off(parents.to(self.subject.device), started)
        except Exception as error:
            # Whatever was free may have gone to another process since.
            if not self.subject.survives(error):
                raise
            if count == 1:
                self.shortage, self.is_over = self.subject.memory.shortage(DOMAINS, self.subject.device, error), True
        self.bounding.make_room()
        self.most = max(1, count // 2)
        if parents is not None:
            self._if_possible(partial(self.pool.put, parents), losing=DOMAINS)
        return None

    def _if_possible(self, run: Callable[[], T], losing: str | None = None) -> T | None:
        """``run()``, or nothing where memory runs out.

        Where domains are lost then, ``losing`` names what was done with them: the search is over, undecided.
        """
        try:
            return run()
        except Exception as error:
            if not self.subject.survives(error):
                raise
            if losing is not None:
                self.shortage = self.subject.memory.shortage(losing, self.subject.device, error)
                self.is_over, self.stuck = True, -inf
        # Not in the handler: the error's traceback holds what the failed step had.
        self.bounding.make_room()
        return None

    def _worked_off(self, parents: Domains, started: float) -> Counterexample | None:
        closer = self.bounding.closer(parents)
        found = self._if_possible(lambda: self._tried(closer.minimiser))
        if found is not None:
            self.pool.put(parents)
            return found
        branched = self.branching.split(parents, closer)
        self._settle(self._certified(branched.halves), self.onward)
        self.pace = (time.monotonic() - started) / len(parents)
        return self._ended(branched.whole)

    def _certified(self, domains: Domains) -> Domains:
        """With margins that hold in real arithmetic, if they have to."""
        return domains if self.certificates is None else self.certificates.certified(domains)

    def _refine_in_time(self) -> None:
        seconds = time.monotonic() - self.started
        while len(self.pool) and self._refine(seconds):
            seconds *= LONGER
        now = time.monotonic()
        self.patience = now + (now - self.started)

    def _refine(self, seconds: float) -> bool:
        """Whether more time for the same is better spent than on splits."""
        self.bounding.make_room()  # what comes has use for the memory
        before, first = self._relaxed(), not self.is_optimised
        self._if_possible(lambda: self._tighten(self._better_bounds(seconds)))
        self._if_possible(lambda: self._suppose_failure(seconds))
        return not first and self._relaxed() < (1 - CLOSED) * before

    def _relaxed(self) -> int:
        """Values whose relaxation is not exact."""
        network = self.bounding.network
        return sum(int(wanted(network, self.shared, site).sum()) for site in after_relaxations(network))

    @cached_property
    def given(self) -> Given:
        climb = CLIMB.within(self.subject.effort, self.deadline)
        return Given(self.bounding.walk, self.question, climb, self.subject.memory)

    def _better_bounds(self, seconds: float) -> Interval:
        now = time.monotonic()
        left = self.deadline - now
        network, box, bounds = self.bounding.network, self.bounding.box, self.shared
        effort = self.subject.effort
        if not self.is_optimised:
            self.is_optimised = True
            return optimised(network, box, bounds, now + OPTIMISING_SHARE * left, effort)
        return refined(network, box, bounds, now + min(seconds, REFINING_SHARE * left), effort)

    def _tighten(self, bounds: Interval) -> None:
        """Take bounds that all domains share."""
        self.shared = bounds
        self.bounding.walk.tighten(self.bounding.bounds.meet(bounds))
        self._begin_again(self.pool.disjuncts)

    def _begin_again(self, disjuncts: Tensor) -> Domains:
        """The whole box; a disjunct that gains more that way than by all its splits starts over."""
        roots = self.bounding.roots(torch.full_like(self.margins, -torch.inf))
        roots = self._optimised(roots.rows(disjuncts.to(roots.margin.device)), self.first)
        self.domains += len(roots)
        for index, disjunct in enumerate(disjuncts.tolist()):
            if float(roots.margin[index]) > self.pool.bound_of(disjunct):
                self.pool.replace(disjunct, self._without_proved(roots.rows(slice(index, index + 1))))
        self.bounding.calibrate(roots)
        return roots

    def _suppose_failure(self, seconds: float) -> None:
        """Tighten what the domains of each open disjunct share."""
        now = time.monotonic()
        until = now + min(max(seconds, QUICK_SECONDS), REFINING_SHARE * (self.deadline - now))
        disjuncts = self.pool.disjuncts
        for index, disjunct in enumerate(disjuncts):
            now = time.monotonic()
            if now > self.deadline:  # of many disjuncts even one ascent each takes long
                break
            self._suppose(disjunct, now + (until - now) / (len(disjuncts) - index))
        self.given.bounding.ascents.forget()

    def _suppose(self, disjunct: Tensor, deadline: float) -> None:
        """As long as that brings the whole box nearer to a proof."""
        self.proved = min(self.proved, 0.0)  # of inputs that satisfy the property no more is known from here on
        margin, before, sites = float(self._begin_again(disjunct[None]).margin), -inf, self.given.sites
        while before * (1 - GAIN) < margin <= 0 and sites and time.monotonic() < deadline:
            left = self.given.tighten(int(disjunct), margin, sites, deadline)
            if left is None:
                self.pool.drop(int(disjunct))
                return
            before, sites = margin, left
            margin = float(self._begin_again(disjunct[None]).margin)

    def _settle(self, domains: Domains, climb: Climb) -> None:
        """Bound domains; those that stay open go to the pool, all at the end."""
        count, domains = len(domains), self._without_proved(domains) if len(domains) else domains
        if len(domains):
            self._keep(self._certified(self._optimised(domains, climb)))
        self.domains += count

    def _optimised(self, domains: Domains, climb: Climb) -> Domains:
        parts = self.bounding.in_parts(
            len(domains), self.bounding.capacity, lambda part: self.bounding.optimised(domains.rows(part), climb)
        )
        return Domains.joined(parts)

    def _keep(self, domains: Domains) -> None:
        self.pool.put(self._without_proved(domains))

    def _without_proved(self, domains: Domains) -> Domains:
        proved = domains.margin > 0
        self.proved = min(self.proved, float(torch.where(proved, domains.margin, torch.inf).amin()))
        return domains.rows(~proved)

    def _ended(self, domains: Domains) -> Counterexample | None:
        """Domains that no split makes tighter; most lack only better multipliers."""
        if self.programs.applies and len(domains):
            return self._by_programs(self._climbed(domains))
        for margin in domains.margin.tolist():
            self._given_up(margin)
        return None

    def _climbed(self, domains: Domains) -> Domains:
        better = self._if_possible(lambda: self._certified(self._optimised(domains, self.first)))
        return self._without_proved(domains if better is None else better)

    def _by_programs(self, domains: Domains) -> Counterexample | None:
        """One by one, as far as they get in a moment."""
        until = min(self.deadline, time.monotonic() + PROGRAM_SECONDS)
        for index in range(len(domains)):
            domain = domains.rows(slice(index, index + 1))
            if self.subject.late(until if index else self.deadline):
                self.pool.put(domains.rows(slice(index, None)))
                return None
            solved = self._solved(domain)
            if solved.counterexample is not None:
                self.pool.put(domains.rows(slice(index, None)))
                return solved.counterexample
            self._given_up(max(float(domain.margin), solved.margin if self.certificates is None else -inf))
        return None

    def _solved(self, domain: Domains) -> Solved:
        """Nothing is proved without the memory for it."""
        try:
            return self.programs.solved(domain, self.bounding.walk.known(domain.disjunct))
        except Exception as error:
            if not self.subject.survives(error):
                raise
            self.shortage = self.subject.memory.shortage(PROGRAMS, self.subject.device, error)
        self.bounding.make_room()
        return Solved(-inf)

    def _given_up(self, margin: float) -> None:
        if margin > 0:
            self.proved = min(self.proved, margin)
        else:
            # What is no number proves nothing, and must not be lost in a comparison.
            self.stuck = min(self.stuck, -inf if isnan(margin) else margin)

    def _tried(self, x: Tensor) -> Counterexample | None:
        """The points where bounds are attained, and where the gradient leads from those of the least margins."""
        x = x.flatten(1)
        values = self.goal.per_disjunct(excess_of(self.subject, self.goal, x, self.at_once)).amin(dim=1)
        box = self.goal.box(self.subject.dtype)
        return descend(self.subject, self.goal, box, x[worst_first(values, TRIED)], self.at_once)

    def _report(self, everyone: Standing) -> None:
        self.bound = max(self.bound, everyone.bound)
        self.watcher(Moment(everyone.domains, everyone.open, self.bound))
