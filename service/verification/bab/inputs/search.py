"""Branch and bound over boxes of inputs, for networks of few of them.

A box is proved when for every disjunct a plane below one of its rows is positive. Others are clipped to where a
counterexample may still be, attacked, and split in two along the input that costs the bounds most; those farthest from
a proof come first. This decides everything except ties, whose boxes become too small to split.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.verification.bab.attack import attack_boxes, attack_from_many_samples, gradient_batch_size
from service.verification.bab.decision import (
    ProgressListener,
    Search,
    SearchResult,
    SearchTask,
    Technique,
)
from service.verification.bab.heuristics import InputView
from service.verification.bab.inputs.boxes import Boxes, BoxPool, BoxTransfer, LinearCut, clip_boxes
from service.verification.bab.inputs.input_bounds import InputBounds, InputBoundsFactory, factories_of
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import GroupState, SearchStatus
from service.verification.bab.specification import Counterexample, Specification
from service.verification.bab.split_tree import SearchTree
from service.verification.bab.splitting_search import SplittingSearch
from service.verification.bab.steps import StepSides, attack_at_steps, step_sides
from service.verification.verdict import Verdict

STAGE = "the search over inputs"


def begin_splitting_inputs(task: SearchTask) -> Search:
    """Begin to split inputs: a :data:`~service.verification.bab.decision.SearchStrategy`."""
    model, specification = task.model, task.specification

    def prepare() -> _InputSearch:
        factories = factories_of(model.engine, task.method, specification.box(model.dtype), model.options)
        return _InputSearch(model, specification, factories, task.deadline, task.listener)

    return model.together(STAGE, prepare)


@dataclass(eq=False)
class _InputSearch(SplittingSearch):
    """The search of one specification, on one rank.

    ``least_proved`` is of disjuncts, and ``least_stuck`` of boxes too small to be split. ``largest_batch`` is the most
    boxes of a round.
    """

    model: ModelUnderVerification
    specification: Specification
    factories: list[InputBoundsFactory]
    deadline: float
    listener: ProgressListener
    box_seconds: float = 0.0
    parts: dict[tuple[bool, ...], tuple[Specification, Tensor]] = field(default_factory=dict)
    pool: BoxPool = field(init=False)
    tree: SearchTree = field(init=False)
    input_bounds: InputBounds = field(init=False)
    largest_batch: int = field(init=False)
    next_attack: int = field(init=False)

    def __post_init__(self) -> None:
        self.settings = self.model.settings.inputs
        self.next_attack = self.settings.first_attack
        whole = self.specification.box(self.model.dtype)
        self.width = whole.width
        # The same points in every run, and the centre of each box among them.
        generator = torch.Generator().manual_seed(0)
        shares = torch.rand(
            self.settings.points_per_box, whole.lower.shape[1], generator=generator, dtype=self.model.dtype
        )
        shares[0] = 0.5
        self.shares, self.attack_batch_size = shares.to(self.model.device), gradient_batch_size(self.model)
        self.sides = step_sides(self.model, self.specification)
        self.pool = BoxPool(self.model.device, self.settings.crowded_entries)
        self.transfer = BoxTransfer(self.pool, self.specification.disjunct_count, self.width.shape[1], self.model.dtype)
        margins = torch.full_like(whole.lower[:, 0], -torch.inf)
        is_open = torch.ones(1, self.specification.disjunct_count, dtype=torch.bool, device=self.model.device)
        self.tree = self.model.splits.begin(Technique.INPUTS.value, lambda number: f"input {number}")
        if self.model.search_group.is_first:
            self.pool.put(Boxes(whole, margins, is_open, {}, self.tree.plant(margins)))
        self._make_input_bounds()

    def _make_input_bounds(self) -> None:
        """Make the next input bounds that fit into memory; raise the last one's error if none does."""
        while True:
            factory = self.factories.pop(0)
            try:
                input_bounds = factory()
                if input_bounds is not None:
                    self.input_bounds, self.largest_batch = input_bounds, self._plan_batch(input_bounds)
                    return
            except Exception as error:
                if not self.factories or not self.model.engine.survives(error):
                    raise
            self._make_room()

    def _plan_batch(self, input_bounds: InputBounds) -> int:
        """Plan the number of boxes in a round; half of the memory is for waiting boxes and counterexamples."""
        device, kind, settings = self.model.device, self.model.device.type, self.settings
        by_entries = settings.entries.get(kind, 2**23) // input_bounds.entries
        most = max(1, min(settings.largest_batch.get(kind, 4096), by_entries))
        bytes_per_box = input_bounds.floats * torch.finfo(self.model.dtype).bits // 8
        return self.model.memory.plan(device, bytes_per_box, most, share=2, least=self.model.engine.least)

    @torch.no_grad()
    def run(self, deadline: float) -> SearchResult:
        self.deadline = deadline
        counterexample: Counterexample | None = None
        while True:
            state = self.model.search_group.synchronise(self._status(), counterexample, self.model.device)
            if state.counterexample is not None:
                self.tree.mark(state.counterexample, range(1))
                return self._end(state, Verdict.FALSIFIED)
            self._report(state.all)
            if not state.all.open:
                if not state.all.stuck:
                    self.tree.finish()
                return self._end(state, Verdict.UNKNOWN if state.all.stuck else Verdict.VERIFIED)
            if state.all.late:
                return self._end(state, Verdict.UNKNOWN)
            self.in_transit += state.handed_over(self.model.search_group.axis.rank)
            for rows in self.model.search_group.rebalance(state, self.transfer, self.model.device):
                self._if_memory_allows(partial(self.transfer.receive, rows), losing=STAGE)
                self.in_transit -= len(rows)
            counterexample = self._round() if self.pool.size else None

    def _status(self) -> SearchStatus:
        return SearchStatus(
            self.pool.size,
            self.domains,
            min(self.pool.least, self.least_proved, self.least_stuck),
            stuck=self.least_stuck != torch.inf or self.is_over,
            late=self.model.engine.late(self.deadline) or self.is_over,
            width=self.transfer.width,
            is_over=self.is_over,
            round=self.largest_batch,
            in_transit=self.in_transit,
        )

    def _end(self, state: GroupState, verdict: Verdict) -> SearchResult:
        is_over = state.all.is_over or not state.all.open
        return SearchResult(verdict, state.counterexample, state.all.domains, self.bound, self.shortage, is_over)

    def _round(self) -> Counterexample | None:
        count, boxes, before = min(self.largest_batch, self._most_in_time()), None, self.domains
        try:
            boxes = self.pool.take(count)
            count = len(boxes)
            return self._measure_round(boxes)
        except Exception as error:
            # Another process may have taken the free memory since.
            if not self.model.engine.survives(error):
                raise
            if count == 1 and not self.factories:
                self._end_short(STAGE, error)
        self._make_room()
        self.domains, self.largest_batch = before, max(1, count // 2)
        if boxes is not None:
            self._if_memory_allows(partial(self.pool.put, boxes), losing=STAGE)
        if count == 1 and self.factories:
            self._replace_input_bounds()
        return None

    def _measure_round(self, boxes: Boxes) -> Counterexample | None:
        started = time.monotonic()
        counterexample = self._branch_and_bound(boxes)
        self.box_seconds = (time.monotonic() - started) / len(boxes)
        return counterexample

    def _most_in_time(self) -> int:
        """Return how many boxes take half of the time that is left, at the pace of the last round, in which fewer may
        have taken longer each; ranks that bound them together would have to agree.
        """
        if not self.model.is_alone or not self.box_seconds or self.deadline == torch.inf:
            return self.largest_batch
        return max(1, int((self.deadline - time.monotonic()) / 2 / self.box_seconds))

    def _replace_input_bounds(self) -> None:
        """Switch to input bounds that take less memory, or end the search if none remain."""
        try:
            self._make_input_bounds()
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
            self._end_short(STAGE, error)

    def _branch_and_bound(self, boxes: Boxes) -> Counterexample | None:
        """Bound boxes, clip those that stay open, attack them, and split them."""
        self.domains += len(boxes)
        chosen = boxes.open.any(dim=0)
        specification, rows = self._of_disjuncts(chosen)
        boxes = replace(boxes, open=boxes.open[:, chosen])
        planes = self.input_bounds.planes(boxes.box, boxes.known, rows)
        cut = LinearCut.of(specification, boxes.box, planes.coefficients, planes.bias)
        clipped_box, margins, is_open = clip_boxes(
            specification, cut, boxes.box, boxes.open, self.settings.clipping_rounds
        )
        # A box keeps the margin of the one that it was cut from, where its own bounds prove less.
        least = torch.maximum(boxes.margins, torch.where(boxes.open, margins, torch.inf).amin(dim=1))
        self.least_proved = min(self.least_proved, _least_proved(boxes, clipped_box, margins, is_open))
        is_kept = is_open.any(dim=1)
        self.tree.record_proofs(boxes.node[~is_kept], least[~is_kept])
        (keep,) = is_kept.nonzero(as_tuple=True)
        if not len(keep):
            return None
        left = is_open.new_zeros(len(is_open), len(chosen))
        left[:, chosen] = is_open
        rest = Boxes(clipped_box, least, left, planes.known, boxes.node)[keep]
        self.tree.tighten(rest.node, rest.margins)
        view = InputView(specification, planes, cut.least(boxes.box), is_open)
        score = self.model.heuristics.inputs.scores(view)[keep] * rest.box.width
        counterexample = self._if_memory_allows(lambda: self._attack(rest.box))
        if counterexample is None:
            self._split(rest, score)
        return counterexample

    def _of_disjuncts(self, chosen: Tensor) -> tuple[Specification, Tensor]:
        """Return the specification of the disjuncts that some box of a round leaves open, and its rows."""
        places = tuple(chosen.tolist())
        if places not in self.parts:
            part = self.specification if all(places) else self.specification.of_disjuncts(chosen)
            self.parts[places] = part, part.rows.to(self.model.dtype)
        return self.parts[places]

    def _attack(self, boxes: Interval) -> Counterexample | None:
        """Attack every open box, and now and then the whole one, by more samples the longer the search lasts."""
        model, specification = self.model, self.specification
        counterexample = attack_boxes(model, specification, boxes, self.shares, self.attack_batch_size)
        if counterexample is None and self.sides is not None:
            counterexample = self._look_at_steps(self.sides, boxes)
        if counterexample is None and self.domains >= self.next_attack:
            samples = min(self.settings.most_samples, self.settings.samples_per_box * self.domains)
            counterexample = attack_from_many_samples(model, specification, samples, self.domains, self.deadline)
            counterexample = counterexample or attack_at_steps(model, specification, self.deadline, self.domains)
            self.next_attack *= self.settings.later_attacks
        return counterexample

    def _look_at_steps(self, sides: StepSides, boxes: Interval) -> Counterexample | None:
        """Try both sides of steps in some of the boxes, and in those that are not split any more."""
        small = ~self._splittable(boxes).any(dim=1)
        found = sides.of_boxes(boxes)
        if found is None and bool(small.any()):
            found = sides.of_boxes(boxes.map(lambda end: end[small]))
        return found

    def _split(self, rest: Boxes, score: Tensor) -> None:
        """Halve boxes by their scores ``(n, features)`` and put the halves into the pool: repeatedly while the
        pool has too few for a round, so that a box may have more than two children.
        """
        small = ~self._splittable(rest.box).any(dim=1)
        if bool(small.any()):
            self.least_stuck = min(self.least_stuck, float(rest.margins[small].nan_to_num(nan=-torch.inf).min()))
            self.tree.stick(rest.node[small])
            rest, score = rest[~small], score[~small]
        while len(rest):
            rest, score = self._halve(rest, score)
            if self.pool.size + len(rest) >= self.largest_batch // 4:
                break
        self.pool.put(rest)

    def _splittable(self, box: Interval) -> Tensor:
        """Return the inputs ``(n, features)`` that can be halved: their middle is another number, with room around."""
        size = torch.maximum(box.lower.abs(), box.upper.abs())
        return box.width > self.settings.smallest_width * self.width + 8 * torch.finfo(size.dtype).eps * size

    def _halve(self, rest: Boxes, score: Tensor) -> tuple[Boxes, Tensor]:
        """Return both halves along each box's largest score, which is halved for the next split."""
        share = rest.box.width / self.width.clamp(min=torch.finfo(self.width.dtype).tiny)
        total = score.sum(dim=1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)
        # An input without influence here must still be split eventually, or a search might never end.
        worth = (score / total).nan_to_num(nan=0.0) + 0.01 * share
        along = torch.where(self._splittable(rest.box), worth, -1.0).argmax(dim=1, keepdim=True)
        middle = rest.box.centre.gather(1, along)
        twice = Boxes.join([rest, rest])
        lower = torch.cat([rest.box.lower, rest.box.lower.scatter(1, along, middle)])
        upper = torch.cat([rest.box.upper.scatter(1, along, middle), rest.box.upper])
        halved = score.scatter(1, along, score.gather(1, along) / 2)
        # The tree has upper halves first, the boxes lower ones.
        node = self.tree.split(rest.node, along[:, 0], middle[:, 0], twice.margins.view(2, -1)).flip(0).flatten()
        return Boxes(Interval(lower, upper), twice.margins, twice.open, twice.known, node), torch.cat([halved, halved])


def _least_proved(boxes: Boxes, clipped_box: Interval, margins: Tensor, is_open: Tensor) -> float:
    """Return the least of the proved ``margins`` ``(n, disjuncts)``, but at most 0 if anything was clipped off:
    more is not proved there.
    """
    least = torch.where(boxes.open & ~is_open, margins, torch.inf).amin()
    is_clipped = (clipped_box.lower > boxes.box.lower) | (clipped_box.upper < boxes.box.upper)
    return float(torch.where(is_clipped.any(), least.clamp(max=0), least))
