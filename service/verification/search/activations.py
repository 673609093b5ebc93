"""Branch and bound over activations (beta-CROWN, Wang et al., 2021): domains are sets of halfspaces of hidden values.

Every disjunct starts one domain, the whole box. Domains that are not proved wait in a pool; those with
the least margins are taken out in batches, split in two where that gains most, bounded on the device, and tried for
a counterexample where their bounds are attained. A domain that leaves only affine operators is a linear program.
Of a rigorous search the root's bounds and every margin are certified; no program or refinement proves anything there.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import inf, isnan

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.parts import with_parts
from service.bounds.rigorous import RigorousAnalysis
from service.bounds.stages import StagedAnalysis
from service.verification.certify import Verdict
from service.verification.search.ascent import Climb
from service.verification.search.attack import descend
from service.verification.search.bounding import Bounding
from service.verification.search.branching import Branching
from service.verification.search.certificates import Certificates, StageCertificates
from service.verification.search.crew import Standing
from service.verification.search.decision import Finding, Moment, Watcher
from service.verification.search.domains import Domains, Handed, Pool
from service.verification.search.given import CLIMB, GAIN, Given
from service.verification.search.goal import Goal
from service.verification.search.intermediate import optimised, wanted
from service.verification.search.programs import Programs
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

Counterexample = tuple[float, ...]


def split_activations(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """A :class:`~service.verification.search.decision.Search`."""
    if not subject.rigorous:
        subject = replace(subject, network=with_parts(subject.network))
    return _Search(subject, goal, deadline, watcher, bounded(subject, goal, method, deadline)).run()


def _bounding(subject: Subject, root: Root) -> Bounding:
    if subject.staged is not None:
        return Bounding(StageWalk(subject.staged, root.box, root.bounds, root.question))
    return Bounding(Walk(subject.network, root.box, root.bounds, root.question))


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
        self.branching = Branching(self.bounding)
        self.certificates = _certificates(subject, self.bounding, root)
        self.programs = Programs(subject, goal)
        self.margins = root.margins
        self.roots = self.bounding.roots(self.margins)
        self.pool = Pool(self.roots)
        self.domains, self.bound = 0, -inf
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
        self._settle(self.roots, self.first)
        self.bounding.calibrate(self.roots)
        if not crew.is_first:  # every rank has bounded the roots; one searches on from there
            self.pool, self.domains = Pool(self.roots), 0
        while True:
            stock = Handed(self.pool, self.roots)
            meeting = crew.meet(self._standing(stock.width), found, device)
            everyone = meeting.all
            self._report(everyone)
            if meeting.found is not None:
                return Finding(Verdict.FALSIFIED, meeting.found, everyone.domains, self.bound)
            if not everyone.open or everyone.late:
                decided = not everyone.open and not everyone.stuck
                return Finding(Verdict.VERIFIED if decided else Verdict.UNKNOWN, None, everyone.domains, self.bound)
            crew.hand_over(meeting, stock, device)
            if everyone.tired and self.certificates is None and self.bounding.numbering.is_whole:
                self._refine_in_time()
            found = self._round() if len(self.pool) else None

    def _standing(self, width: int) -> Standing:
        return Standing(
            len(self.pool),
            self.domains,
            min(self.pool.bound, self.stuck, self.proved),
            stuck=self.stuck < inf,
            late=self.subject.late(self.deadline),
            tired=time.monotonic() > self.patience,
            width=width,
        )

    def _round(self) -> Counterexample | None:
        started = time.monotonic()
        left = max(self.deadline - started, 0)
        count = min(self.most, self.bounding.capacity // 2, int(left / self.pace) if self.pace else 1)
        parents = self.pool.take(self.bounding.numbering.least(max(1, count))).to(self.subject.device)
        if len(parents) == 1 or not self.bounding.walk.is_alone:
            return self._worked_off(parents, started)
        # Whatever was free may have gone to another process since.
        with suppress(torch.OutOfMemoryError):
            return self._worked_off(parents, started)
        self._make_room()
        self.most = len(parents) // 2
        self.pool.put(parents)
        return None

    def _make_room(self) -> None:
        self.bounding.ascents.forget()
        if self.subject.device.type == "cuda":
            torch.cuda.empty_cache()

    def _worked_off(self, parents: Domains, started: float) -> Counterexample | None:
        closer = self.bounding.closer(parents)
        found = self._tried(closer.minimiser)
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
        self._make_room()  # what comes has use for the memory
        before, first = self._relaxed(), not self.is_optimised
        with suppress(torch.OutOfMemoryError):
            self._tighten(self._better_bounds(seconds))
        with suppress(torch.OutOfMemoryError):
            self._suppose_failure(seconds)
        return not first and self._relaxed() < (1 - CLOSED) * before

    def _relaxed(self) -> int:
        """Values whose relaxation is not exact."""
        network = self.bounding.network
        return sum(int(wanted(network, self.shared, site).sum()) for site in after_relaxations(network))

    @cached_property
    def given(self) -> Given:
        return Given(self.bounding.walk, self.question, CLIMB.within(self.subject.effort, self.deadline))

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
        roots = self.bounding.optimised(roots.rows(disjuncts.to(roots.margin.device)), self.first)
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
        """Bound domains; those that stay open go to the pool."""
        self.domains += len(domains)
        if len(domains) and len(domains := self._without_proved(domains)):
            self._keep(self._certified(self.bounding.optimised(domains, climb)))

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
        # Ranks of one model must not part ways; alone, a program takes no memory of the device.
        scarce = (torch.OutOfMemoryError,) if self.bounding.walk.is_alone else ()
        with suppress(*scarce):
            domains = self._certified(self.bounding.optimised(domains, self.first))
        return self._without_proved(domains)

    def _by_programs(self, domains: Domains) -> Counterexample | None:
        """One by one, as far as they get in a moment."""
        until = min(self.deadline, time.monotonic() + PROGRAM_SECONDS)
        for index in range(len(domains)):
            domain = domains.rows(slice(index, index + 1))
            if self.subject.late(until if index else self.deadline):
                self.pool.put(domains.rows(slice(index, None)))
                return None
            solved = self.programs.solved(domain, self.bounding.walk.known(domain.disjunct))
            if solved.counterexample is not None:
                self.pool.put(domains.rows(slice(index, None)))
                return solved.counterexample
            self._given_up(max(float(domain.margin), solved.margin if self.certificates is None else -inf))
        return None

    def _given_up(self, margin: float) -> None:
        if margin > 0:
            self.proved = min(self.proved, margin)
        else:
            # What is no number proves nothing, and must not be lost in a comparison.
            self.stuck = min(self.stuck, -inf if isnan(margin) else margin)

    def _tried(self, x: Tensor) -> Counterexample | None:
        """The points where bounds are attained, and where the gradient leads from those of the least margins."""
        x = x.flatten(1)
        values = self.goal.per_disjunct(self.goal.excess(self.subject.outputs(x))).amin(dim=1)
        box = self.goal.box(self.subject.dtype)
        return descend(self.subject, self.goal, box, x[worst_first(values, TRIED)])

    def _report(self, everyone: Standing) -> None:
        self.bound = max(self.bound, everyone.bound)
        self.watcher(Moment(everyone.domains, everyone.open, self.bound))
