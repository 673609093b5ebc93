"""Branch and bound over activations (β-CROWN, Wang et al., 2021): domains are sets of halfspaces of hidden values.

Every disjunct starts one domain, the whole box. Domains that are not proved wait in a pool; those with the
least margins are taken out in batches, split in two where that gains most, bounded on the device, and attacked
at the inputs that attain their bounds. A domain that leaves only affine operators is a linear program. In a
rigorous search the root's bounds and every margin are certified; linear programs and refinement prove nothing
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, isnan

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.verification.bab.activations.branching import ActivationBranching
from service.verification.bab.activations.certificates import certificates_of
from service.verification.bab.activations.clipping import Clipping, first_layer
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import DomainPool, Domains, DomainTransfer
from service.verification.bab.activations.intermediate_bounds import RootBounds, bound_root
from service.verification.bab.activations.recorded_splits import RecordedSplits
from service.verification.bab.activations.refinement_times import MarginPace, RefinementTimes
from service.verification.bab.activations.restarts import FreshTrees
from service.verification.bab.activations.shared_bounds import SharedBounds
from service.verification.bab.activations.staged_objective import dual_objective
from service.verification.bab.attack import attack_from_best, gradient_batch_size
from service.verification.bab.decision import ProgressListener, Search, SearchResult, SearchTask
from service.verification.bab.lp import LinearPrograms, LpResult
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import SearchStatus
from service.verification.bab.settings import OptimiserSettings
from service.verification.bab.specification import Counterexample, Specification
from service.verification.bab.splitting_search import SplittingSearch
from service.verification.bab.time_plan import share_of_rest
from service.verification.verdict import Verdict

ROOTS, DOMAINS, PROGRAMS = "the bounds of whole boxes", "the search over activations", "linear programs"
"""The phases in which memory may run out."""


def begin_splitting_activations(task: SearchTask) -> Search:
    """Begin to split activations: a :data:`~service.verification.bab.decision.SearchStrategy`."""
    model = replace(task.model, engine=task.model.engine.for_activation_search())
    root = bound_root(model, task.specification, task.method, task.deadline)
    return model.together(
        ROOTS, lambda: _ActivationSearch(model, task.specification, task.deadline, task.listener, root)
    )


class _ActivationSearch(SplittingSearch):
    """The search of one specification, on one rank. It plans for ``deadline``, and each turn ends at ``until``.

    ``least_proved`` is of the proved domains that left the pool.
    """

    def __init__(
        self,
        model: ModelUnderVerification,
        specification: Specification,
        deadline: float,
        listener: ProgressListener,
        root: RootBounds,
    ) -> None:
        self.model, self.specification, self.deadline, self.listener = model, specification, deadline, listener
        self.time = model.settings.time.divided(model.search_group.axis.size)
        self.settings = settings = model.settings.activations
        layer = first_layer(model, specification, root)
        objective = dual_objective(model.engine, root.box, root.bounds, root.specification_rows, layer.index)
        self.domain_bounds = DomainBounds(objective, model.memory, settings.domain_bounds)
        self.branching = ActivationBranching(self.domain_bounds, model.heuristics.activations, settings.branching)
        self.clipping = Clipping(self.domain_bounds, layer, settings.clipping)
        self.certificates = certificates_of(model.engine, self.domain_bounds, root.analysis)
        self.linear_programs = LinearPrograms(model, specification)
        self._attack = partial(attack_from_best, model, specification, settings.starts, gradient_batch_size(model))
        self.margins = root.margins
        self.splits = RecordedSplits.of(model, specification, self.domain_bounds)
        self.roots = self.splits.plant_roots(self.domain_bounds.roots(self.margins))
        self.pool = DomainPool(self.roots, model.memory, settings.pool)
        self.seconds_per_domain = 0.0
        self.round = self.largest_batch = settings.largest_batch[model.device.type]
        self.from_scratch, self.warm_start = (
            each.within(model.options, deadline) for each in (settings.from_scratch, settings.warm_start)
        )
        self.has_begun, self.until = False, deadline
        self.refinement = RefinementTimes(self.time, time.monotonic(), deadline)
        self.shared = SharedBounds(model, self.domain_bounds, root.specification_rows, root.bounds, deadline)
        self.root_is_hurried = root.is_hurried

    def _begin(self) -> None:
        self.has_begun = True
        # Tighter intermediate bounds, and then other roots, are worth more than many iterations of these.
        first = replace(self.from_scratch, doubts_after=self.refinement.due if self.model.engine.refines else inf)
        self._if_memory_allows(lambda: self._bound_and_keep_open(self.roots, first), losing=ROOTS)
        self._if_memory_allows(lambda: self.domain_bounds.calibrate(self.roots))
        group = self.model.search_group
        self.restarts = FreshTrees.of(group, self.pool, len(self.roots), self.model.device)
        # Every rank has bounded the roots, but one alone starts from them: the others get domains by exchange.
        if not group.is_first:
            self.pool = DomainPool(self.roots, self.model.memory, self.settings.pool)
            self.domains = 0

    @torch.no_grad()
    def run(self, deadline: float) -> SearchResult:
        search_group, device = self.model.search_group, self.model.device
        self.until = deadline
        counterexample: Counterexample | None = None
        if not self.has_begun:
            self._begin()
        while True:
            transfer = DomainTransfer(self.pool, self.roots)
            # What decides here is the same on all ranks: one that left alone would leave the others waiting.
            state = search_group.synchronise(self._status(transfer.width), counterexample, device)
            everyone = state.all
            self._report(everyone)
            self.refinement.note(everyone.open, everyone.seconds)
            if state.counterexample is not None:
                self.splits.mark(state.counterexample)
                return SearchResult(Verdict.FALSIFIED, state.counterexample, everyone.domains, self.bound)
            if not everyone.open or everyone.late:
                if decided := not everyone.open and not everyone.stuck:
                    self.splits.tree.finish()
                verdict = Verdict.VERIFIED if decided else Verdict.UNKNOWN
                is_over, is_hurried = everyone.is_over or not everyone.open, everyone.late and self._is_hurried
                ended = self.bound, self.shortage, is_over, is_hurried, self.clipping.is_whole
                return SearchResult(verdict, None, everyone.domains, *ended)
            self.in_transit += state.handed_over(search_group.axis.rank)
            for rows in search_group.rebalance(state, transfer, device):
                self._if_memory_allows(partial(transfer.receive, rows), losing=DOMAINS)
                self.in_transit -= len(rows)
            if self._shall_refine(everyone):
                self._if_shared_memory_allows(self._refine_in_time)
            counterexample = self._round() if len(self.pool) else None

    @property
    def _is_hurried(self) -> bool:
        return self.shared.is_hurried if self.model.engine.refines else self.root_is_hurried

    def _status(self, width: int) -> SearchStatus:
        return SearchStatus(
            len(self.pool),
            self.domains,
            min(self.pool.bound, self.least_stuck, self.least_proved),
            stuck=self.least_stuck < inf or self.is_over,
            late=self.model.engine.late(self.until) or self.is_over,
            is_slow=time.monotonic() > self.refinement.due,
            width=width,
            is_over=self.is_over,
            round=self.round,
            in_transit=self.in_transit,
            seconds=time.monotonic() - self.refinement.started,
        )

    def _shall_refine(self, everyone: SearchStatus) -> bool:
        is_due = everyone.is_slow and self.model.engine.refines
        return is_due and not self.refinement.is_about_to_end(everyone.open, everyone.seconds)

    def _round(self) -> Counterexample | None:
        started = time.monotonic()
        left = max(self.deadline - started, 0)
        count, parents = 1, None
        try:
            in_time = int(left / self.seconds_per_domain) if self.seconds_per_domain else 1
            # Half of the capacity, since every parent becomes two.
            count = min(self.largest_batch, self.domain_bounds.capacity // 2, in_time)
            count = self.domain_bounds.neuron_index.least(max(1, count))
            self.round = count
            parents = self.pool.take(count)
            count = len(parents)
            return self._branch_and_bound(parents.to(self.model.device), started)
        except Exception as error:
            # Another process may have taken the free memory since.
            if not self.model.engine.survives(error):
                raise
            if count == 1:  # a single domain cannot be made smaller
                self._end_short(DOMAINS, error)
        self._make_room()
        self.largest_batch = max(1, count // 2)
        if parents is not None:
            self._if_memory_allows(partial(self.pool.put, parents), losing=DOMAINS)
        return None

    def _make_room(self) -> None:
        self.domain_bounds.make_room()

    def _branch_and_bound(self, parents: Domains, started: float) -> Counterexample | None:
        """Attack at the minimisers of the parents' bounds, split the parents, and bound the halves."""
        inspection = self.domain_bounds.inspect(parents)
        counterexample = self._if_memory_allows(lambda: self._attack(inspection.minimiser))
        if counterexample is not None:
            self.pool.put(parents)
            return counterexample
        branched = self.branching.split(parents, inspection)
        halves = self.splits.record_halves(branched.halves)
        self._bound_and_keep_open(self._certify(halves), self.warm_start)
        self.seconds_per_domain = (time.monotonic() - started) / len(parents)
        return self._decide_unsplit(branched.unsplit)

    def _certify(self, domains: Domains) -> Domains:
        """Return domains with margins that hold in real arithmetic, if the search is rigorous."""
        return domains if self.certificates is None else self.certificates.certify(domains)

    def _refine_in_time(self) -> None:
        """Tighten what all domains share. All ranks of the search do so together, step by step."""
        begun = time.monotonic()
        seconds = begun - self.refinement.started
        while len(self._open_disjuncts()) and self._refine(seconds):
            seconds *= self.time.lengthening
        self.refinement.end(begun, time.monotonic())

    def _refine(self, seconds: float) -> bool:
        """Refine for ``seconds``; return whether to spend twice that on more refinement rather than on splits."""
        self._make_room()  # the next steps need the memory
        before, first = self.shared.count_inexact_relaxations(), not self.shared.is_optimised
        self._if_shared_memory_allows(lambda: self._tighten(self.shared.tighter(seconds, self.until)))
        self._if_shared_memory_allows(lambda: self._tighten_by_invprop(seconds))
        return not first and self.time.is_refinement_worthwhile(before, self.shared.count_inexact_relaxations())

    def _if_shared_memory_allows(self, run: Callable[[], None]) -> None:
        """Run what all ranks of the search do together: one that left it for lack of memory would keep them waiting."""
        if self.shared.work.is_divided:
            run()
        else:
            self._if_memory_allows(run)

    def _open_disjuncts(self) -> Tensor:
        """Return the disjuncts of which any rank has an open domain."""
        is_open = torch.zeros(len(self.roots), dtype=torch.int64, device=self.model.device)
        is_open[self.pool.disjuncts.to(self.model.device)] = 1
        return self.model.search_group.most(is_open).nonzero().squeeze(1)

    def _tighten(self, bounds: Interval) -> None:
        """Take tighter bounds for all domains."""
        self.shared.bounds = bounds
        self.domain_bounds.objective.tighten(self.domain_bounds.bounds.meet(bounds))
        self._bound_roots_again(self._open_disjuncts())

    def _bound_roots_again(self, disjuncts: Tensor) -> Tensor:
        """Bound whole boxes again, and return their margins ``(n,)``; where a new tree is smaller, it starts over."""
        group = self.model.search_group
        roots = self.domain_bounds.roots(torch.full_like(self.margins, -inf)).with_(node=self.roots.node)
        roots = roots.rows(disjuncts)
        found = self._if_memory_allows(lambda: self._optimise(roots, self.from_scratch))
        roots = roots if found is None else found
        self.domains += len(roots) if group.is_first else 0
        margins = group.agree(roots.margin)
        for index in self.restarts.chosen(self.pool, disjuncts, margins):
            self._start_over(int(disjuncts[index]), roots.rows(slice(index, index + 1)))
        self._if_memory_allows(lambda: self.domain_bounds.calibrate(roots))
        return margins

    def _start_over(self, disjunct: int, root: Domains) -> None:
        """Let the root of a disjunct, which the first rank takes, replace the domains of all ranks."""
        self.splits.tree.restart(disjunct)
        if self.model.search_group.is_first:
            # Alone, a rank keeps its domains if it has no memory for the root; the others have dropped theirs.
            losing = ROOTS if self.shared.work.is_divided else None
            self._if_memory_allows(lambda: self.pool.replace(disjunct, self._drop_proved(root)), losing=losing)
        else:
            self.pool.drop(disjunct)

    def _tighten_by_invprop(self, seconds: float) -> None:
        """Tighten the bounds that the domains of each open disjunct share."""
        now, disjuncts = time.monotonic(), self._open_disjuncts()
        until, most = self.time.invprop_deadlines(now, self.until, seconds, now - self.refinement.started)
        for index, disjunct in enumerate(disjuncts):
            if self.shared.work.late(self.until):  # with many disjuncts, even one ascent for each takes long
                break
            now, left = time.monotonic(), len(disjuncts) - index
            self._tighten_disjunct(disjunct, *(share_of_rest(now, each, 1, left) for each in (until, most)))
        self.shared.invprop.domain_bounds.optimisation.forget()

    def _tighten_disjunct(self, disjunct: Tensor, deadline: float, most: float) -> None:
        """Tighten one disjunct as long as that brings the whole box closer to a proof: until ``deadline``, or on all
        layers until ``most`` while the pace of the last round is enough for a proof by then.
        """
        # These bounds say nothing about inputs that satisfy the property.
        self.least_proved = min(self.least_proved, 0.0)
        invprop, late, least = self.shared.invprop, self.shared.work.late, self.settings.invprop.least_margin_gain
        pace, layers = MarginPace(float(self._bound_roots_again(disjunct[None]))), invprop.preactivations
        while pace.margin <= 0:
            is_paced = not pace.has_gained(least) or not layers or late(deadline)
            if is_paced and late(most - pace.seconds_to_proof):
                return
            layers, end = (invprop.preactivations, most) if is_paced else (layers, deadline)
            begun = time.monotonic()
            if (gained := invprop.tighten(int(disjunct), pace.margin, layers, end)) is None:
                self.pool.drop(int(disjunct))
                self.splits.tree.finish(int(disjunct))
                return
            margin, layers = float(self._bound_roots_again(disjunct[None])), gained
            pace = MarginPace(margin, pace.margin, time.monotonic() - begun)

    def _bound_and_keep_open(self, domains: Domains, settings: OptimiserSettings) -> None:
        """Bound domains, and put those that stay open into the pool, all at the end."""
        # Halves come with margins, and nothing is spent on those that are proved before they are bounded.
        count, domains = len(domains), self._drop_proved(domains) if len(domains) else domains
        if len(domains):
            if domains.depth and self.clipping.applies:
                # Clipped bounds, like those of INVPROP, say nothing about inputs that satisfy the property.
                domains, self.least_proved = self.clipping.clip(domains, self.until), min(self.least_proved, 0.0)
            left = self._drop_proved(self._certify(self._optimise(domains, settings)))
            self.splits.tree.tighten(left.node, left.margin)
            self.pool.put(left)
        self.domains += count

    def _optimise(self, domains: Domains, settings: OptimiserSettings) -> Domains:
        bounds, count = self.domain_bounds, len(domains)
        parts = bounds.in_parts(count, bounds.capacity, lambda part: bounds.optimise(domains.rows(part), settings))
        return Domains.join(parts)

    def _drop_proved(self, domains: Domains) -> Domains:
        proved = domains.margin > 0
        self.least_proved = min(self.least_proved, float(torch.where(proved, domains.margin, torch.inf).amin()))
        self.splits.tree.record_proofs(domains.node[proved], domains.margin[proved])
        return domains.rows(~proved)

    def _decide_unsplit(self, domains: Domains) -> Counterexample | None:
        """Decide domains that no split tightens; most need only better multipliers.

        Linear programs decide them if the model is piecewise linear; otherwise they are given up.
        """
        if self.linear_programs.applies and len(domains):
            return self._solve_programs(self._optimise_from_scratch(domains))
        for domain in domains.each():
            self._give_up(domain, float(domain.margin))
        return None

    def _optimise_from_scratch(self, domains: Domains) -> Domains:
        better = self._if_memory_allows(lambda: self._certify(self._optimise(domains, self.from_scratch)))
        return self._drop_proved(domains if better is None else better)

    def _solve_programs(self, domains: Domains) -> Counterexample | None:
        """Solve domains one by one, as many as a moment allows."""
        until = self.time.programs_deadline(time.monotonic(), self.deadline)
        for index, domain in enumerate(domains.each()):
            # One program at least in each round, or a slow one would be put back for ever.
            if self.model.engine.late(until if index else self.deadline):
                self.pool.put(domains.rows(slice(index, None)))
                return None
            solved = self._solve(domain)
            if solved.counterexample is not None:
                self.pool.put(domains.rows(slice(index, None)))
                return solved.counterexample
            # A program is solved in rounded arithmetic, from which a rigorous search takes no proof.
            self._give_up(domain, max(float(domain.margin), solved.margin if self.certificates is None else -inf))
        return None

    def _solve(self, domain: Domains) -> LpResult:
        """Solve a domain as a linear program; without enough memory, nothing is proved."""
        try:
            known = self.domain_bounds.objective.known(domain.disjunct)
            return self.linear_programs.solve(self.clipping.split_where_closed(domain), known)
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
            self.shortage = self.model.memory.shortage(PROGRAMS, self.model.device, error)
        self._make_room()
        return LpResult(-inf)

    def _give_up(self, domain: Domains, margin: float) -> None:
        """Drop one domain, whose ``margin`` is proved."""
        if margin > 0:
            self.least_proved = min(self.least_proved, margin)
            self.splits.tree.record_proofs(domain.node, torch.tensor([margin]))
        else:
            self.splits.tree.stick(domain.node)
            # NaN proves nothing, and a comparison must not hide it.
            self.least_stuck = min(self.least_stuck, -inf if isnan(margin) else margin)
