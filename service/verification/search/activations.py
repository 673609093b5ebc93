"""Branch and bound over activations (beta-CROWN, Wang et al., 2021): domains are sets of halfspaces of hidden values.

Every disjunct starts one domain, the whole box. Domains that are not proved wait in a pool on the host; those with
the least margins are taken out in batches, split in two where that gains most, bounded on the device, and tried for
a counterexample where their bounds are attained. A domain that leaves only affine operators is a linear program.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Analysis, Effort
from service.bounds.network import Network
from service.verification.certify import ABSOLUTE_MARGIN, RELATIVE_MARGIN, Verdict
from service.verification.search.attack import descent, inside
from service.verification.search.bounding import Bounding, Question
from service.verification.search.branching import Branching
from service.verification.search.decision import Finding, Moment, Watcher
from service.verification.search.domains import Domains, Pool
from service.verification.search.goal import Goal
from service.verification.search.programs import Programs
from service.verification.search.subject import Subject, worst_first

ROOT_ITERATIONS, ITERATIONS = 60, 20
LARGEST_BATCH = 4096
TRIED, DESCENTS = 16, 4
"""Minimisers of a round from which a counterexample is sought by descent, and its steps."""

Counterexample = tuple[float, ...]


def split_activations(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """A :class:`~service.verification.search.decision.Search`."""
    root = _root(subject, goal, method)
    return _Search(subject, goal, deadline, watcher, root).run()


@dataclass(frozen=True, eq=False)
class _Root:
    """The whole box: bounds of the hidden values, and margins ``(disjuncts, rows)`` of the question."""

    box: Interval
    bounds: dict[str, Interval]
    question: Question
    margins: Tensor


@torch.no_grad()
def _root(subject: Subject, goal: Goal, method: str) -> _Root:
    network = subject.network
    box = goal.box(subject.dtype).map(lambda end: end.reshape(1, *network.graph.input.shape))
    analysis = METHODS[method](network, box, Effort())
    bounds = {
        name: interval
        for node in network.nonlinear
        for name, interval in zip(node.inputs, analysis.inputs[node.name], strict=True)
    }
    return _Root(box, bounds, *_asked(network, goal, analysis, subject.dtype))


def _asked(network: Network, goal: Goal, analysis: Analysis, dtype: torch.dtype) -> tuple[Question, Tensor]:
    """Rows by disjunct, and what the root's bounds prove of each."""
    rows, thresholds = goal.rows.to(dtype), goal.thresholds.to(dtype)
    both = torch.cat([rows, -rows]).reshape(-1, *network.graph.output.shape)
    below = analysis.lower_bounds(both[None])[0]
    least, most = below[: len(rows)], -below[len(rows) :]
    reach = torch.maximum(least.abs(), most.abs()).nan_to_num(posinf=0.0) + thresholds.abs()
    offsets = thresholds + ABSOLUTE_MARGIN[dtype] + RELATIVE_MARGIN[dtype] * reach
    place = torch.stack([(goal.disjunct[:index] == own).sum() for index, own in enumerate(goal.disjunct)])
    shape = goal.disjuncts, int(place.max()) + 1
    used = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    used[goal.disjunct, place] = True
    question = Question(rows.new_zeros(*shape, rows.shape[1]), rows.new_zeros(shape), used)
    question.rows[goal.disjunct, place], question.offsets[goal.disjunct, place] = rows, offsets
    margins = rows.new_full(shape, -torch.inf)
    margins[goal.disjunct, place] = least - offsets
    return question, margins.nan_to_num(nan=-torch.inf)


class _Search:
    """The open domains of one goal."""

    def __init__(self, subject: Subject, goal: Goal, deadline: float, watcher: Watcher, root: _Root) -> None:
        self.subject, self.goal, self.deadline, self.watcher = subject, goal, deadline, watcher
        self.bounding = Bounding(subject.network, root.box, root.bounds, root.question)
        self.branching = Branching(self.bounding)
        self.programs = Programs(subject, goal, self.bounding.lower, self.bounding.upper)
        self.roots = self.bounding.roots(root.margins)
        self.pool = Pool(self.roots)
        self.domains, self.bound = 0, -inf
        self.proved, self.stuck = inf, inf
        self.pace = 0.0

    @torch.no_grad()
    def run(self) -> Finding:
        self._settle(self.roots, ROOT_ITERATIONS)
        self._report()
        found = None
        while found is None and len(self.pool) and time.monotonic() < self.deadline:
            found = self._round()
            self._report()
        if found is not None:
            return Finding(Verdict.FALSIFIED, found, self.domains, self.bound)
        decided = not len(self.pool) and self.stuck == inf
        return Finding(Verdict.VERIFIED if decided else Verdict.UNKNOWN, None, self.domains, self.bound)

    def _round(self) -> Counterexample | None:
        started = time.monotonic()
        left = max(self.deadline - started, 0)
        count = min(LARGEST_BATCH, self.bounding.capacity // 2, int(left / self.pace) if self.pace else 1)
        parents = self.pool.take(max(1, count)).to(self.subject.device)
        closer = self.bounding.closer(parents)
        found = self._tried(closer.minimiser)
        if found is not None:
            self.pool.put(parents)
            return found
        branched = self.branching.split(parents, closer)
        self._settle(branched.halves, ITERATIONS)
        self.pace = (time.monotonic() - started) / len(parents)
        return self._ended(branched.whole)

    def _settle(self, domains: Domains, iterations: int) -> None:
        """Bound domains; those that stay open go to the pool."""
        self.domains += len(domains)
        if len(domains) and len(domains := self._without_proved(domains)):
            self.pool.put(self._without_proved(self.bounding.optimised(domains, iterations)))

    def _without_proved(self, domains: Domains) -> Domains:
        proved = domains.margin > 0
        self.proved = min(self.proved, float(torch.where(proved, domains.margin, torch.inf).amin()))
        return domains.rows(~proved)

    def _ended(self, domains: Domains) -> Counterexample | None:
        """Domains that no split makes tighter."""
        for index in range(len(domains)):
            domain = domains.rows(slice(index, index + 1))
            margin = float(domain.margin)
            if self.programs.applies:
                if time.monotonic() > self.deadline:
                    self.pool.put(domains.rows(slice(index, None)))
                    return None
                solved = self.programs.solved(domain)
                if solved.counterexample is not None:
                    self.pool.put(domains.rows(slice(index, None)))
                    return solved.counterexample
                margin = max(margin, solved.margin)
            if margin > 0:
                self.proved = min(self.proved, margin)
            else:
                self.stuck = min(self.stuck, margin)
        return None

    def _tried(self, x: Tensor) -> Counterexample | None:
        """The points where bounds are attained, and where the gradient leads from those of the least margins."""
        x = x.flatten(1)
        box = Interval(*(end.flatten(1) for end in (self.bounding.box.lower, self.bounding.box.upper)))
        values = self.goal.per_disjunct(self.goal.excess(self.subject.module(x))).amin(dim=1)
        chosen = x[worst_first(values, TRIED)]
        for step in range(DESCENTS + 1):
            values, gradient = descent(self.subject, self.goal, chosen)
            if bool((values <= 0).any()):
                found = self.subject.convinced(self.goal, chosen[worst_first(values, 4)])
                if found is not None:
                    return found
            chosen = inside(chosen - gradient.sign() * 2.0**-step * box.width / 2, box)
        return None

    def _report(self) -> None:
        self.bound = max(self.bound, min(self.pool.bound, self.stuck, self.proved))
        self.watcher(Moment(self.domains, len(self.pool), self.bound))
