"""Branch and bound over boxes of inputs.

A box is done when a backward pass proves for every disjunct one row that cannot hold in it. Others are cut in two
along the input that moves the nearest disjunct most, those farthest from a proof first. Every box that is cut is
tried for a counterexample on the way. For few inputs this decides everything but ties; for many it is one pass.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Effort
from service.verification.certify import ABSOLUTE_MARGIN, RELATIVE_MARGIN, Verdict
from service.verification.search.attack import descent, inside
from service.verification.search.decision import Finding, Moment, Watcher
from service.verification.search.goal import Goal
from service.verification.search.subject import Subject, worst_first

FEW_INPUTS = 64
"""With more inputs than this, halving one of them gains nothing."""
SMALLEST = 1e-9
"""Of the whole width: a box is not cut below that."""
START, LARGEST = 16, 512


def split_inputs(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """A :class:`~service.verification.search.decision.Search`."""
    search = _Search(subject, goal, method, deadline)
    verdict, found = search.run(watcher)
    return Finding(verdict, found, search.domains, search.bound)


class _Search:
    """The open boxes of one goal, with their margins."""

    def __init__(self, subject: Subject, goal: Goal, method: str, deadline: float) -> None:
        self.subject, self.goal, self.deadline = subject, goal, deadline
        self.method, self.domains = METHODS[method], 0
        self.box = goal.box(subject.dtype)
        self.margins = torch.full((1,), -torch.inf, dtype=subject.dtype, device=subject.device)
        self.whole = self.box.width[0]

    @torch.no_grad()
    def run(self, watcher: Watcher) -> tuple[Verdict, tuple[float, ...] | None]:
        size = START
        while len(self.margins):
            watcher(Moment(self.domains, len(self.margins), self.bound))
            if time.monotonic() > self.deadline:
                return Verdict.UNKNOWN, None
            boxes = self._take(size)
            left, margins = self._bounded(boxes)
            found = self._tried(left)
            if found is not None:
                return Verdict.FALSIFIED, found
            if not len(margins):
                continue
            if self.box.lower.shape[1] > FEW_INPUTS or bool((left.width <= SMALLEST * self.whole).all(dim=1).any()):
                return Verdict.UNKNOWN, None
            self._put(*self._halved(left, margins))
            size = min(2 * size, LARGEST)
        return Verdict.VERIFIED, None

    @property
    def bound(self) -> float:
        return float(self.margins.min()) if len(self.margins) else 0.0

    def _take(self, count: int) -> Interval:
        chosen = torch.zeros(len(self.margins), dtype=torch.bool, device=self.margins.device)
        chosen[list(worst_first(self.margins, count))] = True
        taken = self.box.map(lambda end: end[chosen])
        self.box, self.margins = self.box.map(lambda end: end[~chosen]), self.margins[~chosen]
        return taken

    def _put(self, box: Interval, margins: Tensor) -> None:
        self.box = Interval(torch.cat([self.box.lower, box.lower]), torch.cat([self.box.upper, box.upper]))
        self.margins = torch.cat([self.margins, margins])

    def _bounded(self, boxes: Interval) -> tuple[Interval, Tensor]:
        """The boxes that are not proved, with their margins."""
        self.domains += len(boxes.lower)
        rows = self.goal.rows.to(self.subject.dtype)
        analysis = self.method(self.subject.network, boxes, Effort())
        below = analysis.lower_bounds(torch.cat([rows, -rows])[None])
        least, most = below[:, : len(rows)], -below[:, len(rows) :]
        thresholds = self.goal.thresholds.to(self.subject.dtype)
        reach = torch.maximum(least.abs(), most.abs()) + thresholds.abs()
        slack = ABSOLUTE_MARGIN[self.subject.dtype] + RELATIVE_MARGIN[self.subject.dtype] * reach
        margins = self.goal.per_disjunct((least - thresholds - slack).nan_to_num(nan=-torch.inf)).amin(dim=1)
        unproved = ~(margins > 0)
        return boxes.map(lambda end: end[unproved]), margins[unproved]

    def _tried(self, boxes: Interval) -> tuple[float, ...] | None:
        """Each box's centre, and where the gradient leads from there."""
        if not len(boxes.lower):
            return None
        x = boxes.centre
        for _ in range(3):
            values, gradient = descent(self.subject, self.goal, x)
            if bool((values <= 0).any()):
                found = self.subject.convinced(self.goal, x[worst_first(values, 4)])
                if found is not None:
                    return found
            x = inside(x - gradient.sign() * boxes.width / 2, boxes)
        return None

    def _halved(self, boxes: Interval, margins: Tensor) -> tuple[Interval, Tensor]:
        _, gradient = descent(self.subject, self.goal, boxes.centre)
        share = boxes.width / self.whole.clamp(min=torch.finfo(self.subject.dtype).tiny)
        moved = gradient.abs() * boxes.width
        moved = moved / moved.sum(dim=1, keepdim=True).clamp(min=torch.finfo(moved.dtype).tiny)
        # A direction without slope at the centre still has to be cut some day, or a search might never end.
        along = (moved + 0.1 * share * (boxes.width > 0)).argmax(dim=1, keepdim=True)
        middle = boxes.centre.gather(1, along)
        first, second = boxes.upper.scatter(1, along, middle), boxes.lower.scatter(1, along, middle)
        halves = Interval(torch.cat([boxes.lower, second]), torch.cat([first, boxes.upper]))
        return halves, margins.repeat(2)
