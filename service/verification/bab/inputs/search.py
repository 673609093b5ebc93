"""Branch and bound over boxes of inputs, for networks of few of them.

A box is done when for every disjunct a plane below one of its rows is positive. Others are clipped to where a
counterexample may still be, tried for one, and cut in two along the input that costs the bounds most; those farthest
from a proof come first. This decides everything but ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import MemoryShortageError, make_room
from service.bounds.methods import Method
from service.verification.bab.attack import attack_boxes, attack_nearby, inputs_at_once
from service.verification.bab.clipping import LinearCut, clipped
from service.verification.bab.decision import ProgressListener, SearchProgress, SearchResult
from service.verification.bab.heuristics import InputView
from service.verification.bab.inputs.boxes import Boxes, BoxPool, BoxTransfer
from service.verification.bab.inputs.input_bounds import (
    InputBounds,
    InputBoundsFactory,
)
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import GroupState, SearchStatus
from service.verification.bab.specification import Specification
from service.verification.certify import Verdict

STAGE = "the search over inputs"


def split_inputs(
    model: ModelUnderVerification,
    specification: Specification,
    method: Method,
    deadline: float,
    listener: ProgressListener,
) -> SearchResult:
    """Search by splitting inputs: a :class:`~service.verification.bab.decision.SearchStrategy`."""

    def prepared() -> _InputSearch:
        factories = model.engine.input_bounds(method, specification.box(model.dtype), model.effort)
        return _InputSearch(model, specification, factories, deadline, listener)

    return model.together(STAGE, prepared).run()


@dataclass(eq=False)
class _InputSearch:
    """``proved`` is the least margin of what is settled; ``tied`` have boxes too small to be cut."""

    model: ModelUnderVerification
    specification: Specification
    factories: list[InputBoundsFactory]
    deadline: float
    listener: ProgressListener
    domains: int = 0
    bound: float = -torch.inf
    proved: float = torch.inf
    tied: float = torch.inf
    shortage: MemoryShortageError | None = None
    is_over: bool = False
    pool: BoxPool = field(init=False)
    input_bounds: InputBounds = field(init=False)
    batch: int = field(init=False)
    next_attack: int = field(init=False)

    def __post_init__(self) -> None:
        self.settings = self.model.settings.inputs
        self.next_attack = self.settings.first_attack
        whole = self.specification.box(self.model.dtype)
        self.width = whole.width
        self.rows = self.specification.rows.to(self.model.dtype)
        generator = torch.Generator().manual_seed(0)
        places = torch.rand(self.settings.places, whole.lower.shape[1], generator=generator, dtype=self.model.dtype)
        places[0] = 0.5
        self.places, self.at_once = places.to(self.model.device), inputs_at_once(self.model)
        self.pool = BoxPool(self.model.device, self.settings.crowded_entries)
        self.transfer = BoxTransfer(self.pool, self.specification.disjunct_count, self.width.shape[1], self.model.dtype)
        margins = torch.full_like(whole.lower[:, 0], -torch.inf)
        left = torch.ones(1, self.specification.disjunct_count, dtype=torch.bool, device=self.model.device)
        if self.model.search_group.is_first:
            self.pool.put(Boxes(whole, margins, left, {}))
        self._take_factory()

    def _take_factory(self) -> None:
        """Take the next way to bound for which there is memory; raises the last one's error where there is none."""
        while True:
            factory = self.factories.pop(0)
            try:
                found = factory()
                if found is not None:
                    self.input_bounds, self.batch = found, self._planned(found)
                    return
            except Exception as error:
                if not self.factories or not self.model.engine.survives(error):
                    raise
            make_room(self.model.device)

    def _planned(self, by: InputBounds) -> int:
        """Plan how many boxes a round has; half of the memory is for what waits, and for counterexamples."""
        device, kind = self.model.device, self.model.device.type
        most = max(
            1, min(self.settings.largest_batch.get(kind, 4096), self.settings.entries.get(kind, 2**23) // by.entries)
        )
        each = by.floats * torch.finfo(self.model.dtype).bits // 8
        return self.model.memory.plan(device, each, most, share=2, least=self.model.engine.least)

    @torch.no_grad()
    def run(self) -> SearchResult:
        found = None
        while True:
            state = self.model.search_group.synchronise(self._status(), found, self.model.device)
            if state.found is not None:
                return self._end(state, Verdict.FALSIFIED)
            self._tell(state.all)
            if not state.all.open:
                return self._end(state, Verdict.UNKNOWN if state.all.stuck else Verdict.VERIFIED)
            if state.all.late:
                return self._end(state, Verdict.UNKNOWN)
            for rows in self.model.search_group.rebalance(state, self.transfer, self.model.device):
                self._keep(partial(self.transfer.receive, rows))
            found = self._round() if self.pool.size else None

    def _status(self) -> SearchStatus:
        return SearchStatus(
            self.pool.size,
            self.domains,
            min(self.pool.least, self.proved, self.tied),
            stuck=self.tied != torch.inf or self.is_over,
            late=self.model.engine.late(self.deadline) or self.is_over,
            width=self.transfer.width,
        )

    def _tell(self, everyone: SearchStatus) -> None:
        self.bound = max(self.bound, everyone.bound)
        self.listener(SearchProgress(everyone.domains, everyone.open, self.bound))

    def _end(self, state: GroupState, verdict: Verdict) -> SearchResult:
        return SearchResult(verdict, state.found, state.all.domains, self.bound, self.shortage)

    def _round(self) -> tuple[float, ...] | None:
        count, boxes, before = self.batch, None, self.domains
        try:
            boxes = self.pool.take(count)
            count = len(boxes)
            return self._worked_off(boxes)
        except Exception as error:
            # Whatever was free may have gone to another process since.
            if not self.model.engine.survives(error):
                raise
            if count == 1 and not self.factories:
                self._end_short(error)
        make_room(self.model.device)
        self.domains, self.batch = before, max(1, count // 2)
        if boxes is not None:
            self._keep(partial(self.pool.put, boxes))
        if count == 1 and self.factories:
            self._take_next_factory()
        return None

    def _take_next_factory(self) -> None:
        try:
            self._take_factory()
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
            self._end_short(error)

    def _end_short(self, error: Exception) -> None:
        self.shortage, self.is_over = self.model.memory.shortage(STAGE, self.model.device, error), True

    def _keep(self, put: Callable[[], None]) -> None:
        """Put boxes into the pool; without the memory for that the search is over, undecided."""
        try:
            put()
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
            self._end_short(error)
            self.tied = -torch.inf  # of what is lost nothing is proved

    def _worked_off(self, boxes: Boxes) -> tuple[float, ...] | None:
        self.domains += len(boxes)
        planes = self.input_bounds.planes(boxes.box, boxes.known, self.rows)
        cut = LinearCut.of(self.specification, boxes.box, planes.coefficients, planes.bias)
        smaller, each, left = clipped(self.specification, cut, boxes.box, boxes.open, self.settings.clipping_rounds)
        margins = torch.maximum(boxes.margins, torch.where(boxes.open, each, torch.inf).amin(dim=1))
        self.proved = min(self.proved, _least_settled(boxes, smaller, each, left))
        (keep,) = left.any(dim=1).nonzero(as_tuple=True)
        if not len(keep):
            return None
        rest = Boxes(smaller, margins, left, planes.known)[keep]
        view = InputView(self.specification, planes, cut.least(boxes.box), left)
        score = self.model.heuristics.inputs.scores(view)[keep] * rest.box.width
        found = self._tried_if_possible(rest.box)
        if found is None:
            self._put(rest, score)
        return found

    def _tried_if_possible(self, box: Interval) -> tuple[float, ...] | None:
        """Attack boxes; without the memory for it the search goes on, since an attack proves nothing."""
        try:
            return self._tried(box)
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
        make_room(self.model.device)
        return None

    def _tried(self, box: Interval) -> tuple[float, ...] | None:
        """Attack every open box, and now and then all of the box, by more samples the longer the search lasts."""
        found = attack_boxes(self.model, self.specification, box, self.places, self.at_once)
        if found is None and self.domains >= self.next_attack:
            samples = min(self.settings.most_samples, self.settings.samples_per_box * self.domains)
            found = attack_nearby(self.model, self.specification, samples, self.domains, self.deadline)
            self.next_attack *= self.settings.later_attacks
        return found

    def _put(self, rest: Boxes, score: Tensor) -> None:
        small = ~self._cuttable(rest.box).any(dim=1)
        if bool(small.any()):
            self.tied = min(self.tied, float(rest.margins[small].nan_to_num(nan=-torch.inf).min()))
            rest, score = rest[~small], score[~small]
        while len(rest):
            rest, score = self._halved(rest, score)
            if self.pool.size + len(rest) >= self.batch // 4:
                break
        self.pool.put(rest)

    def _cuttable(self, box: Interval) -> Tensor:
        """Return which inputs can be halved: those whose middle is a number of its own, with room around it."""
        size = torch.maximum(box.lower.abs(), box.upper.abs())
        return box.width > self.settings.smallest_width * self.width + 8 * torch.finfo(size.dtype).eps * size

    def _halved(self, rest: Boxes, score: Tensor) -> tuple[Boxes, Tensor]:
        """Cut in two along the largest score, which is halved for the next cut."""
        share = rest.box.width / self.width.clamp(min=torch.finfo(self.width.dtype).tiny)
        total = score.sum(dim=1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)
        # An input without influence here still has to be cut some day, or a search might never end.
        worth = (score / total).nan_to_num(nan=0.0) + 0.01 * share
        along = torch.where(self._cuttable(rest.box), worth, -1.0).argmax(dim=1, keepdim=True)
        middle = rest.box.centre.gather(1, along)
        twice = Boxes.joined([rest, rest])
        lower = torch.cat([rest.box.lower, rest.box.lower.scatter(1, along, middle)])
        upper = torch.cat([rest.box.upper.scatter(1, along, middle), rest.box.upper])
        halved = score.scatter(1, along, score.gather(1, along) / 2)
        return Boxes(Interval(lower, upper), twice.margins, twice.open, twice.known), torch.cat([halved, halved])


def _least_settled(boxes: Boxes, smaller: Interval, each: Tensor, left: Tensor) -> float:
    """Return the least margin of settled disjuncts, and 0 with anything cut off: more is not proved there."""
    least = torch.where(boxes.open & ~left, each, torch.inf).amin()
    cut = (smaller.lower > boxes.box.lower) | (smaller.upper < boxes.box.upper)
    return float(torch.where(cut.any(), least.clamp(max=0), least))
