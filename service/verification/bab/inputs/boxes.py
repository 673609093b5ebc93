"""Holds open boxes of a search over inputs and the pool in which they wait, and shrinks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.planes import Known
from service.verification.bab.specification import Specification
from service.verification.bab.split_tree import UNKNOWN
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Boxes:
    """``box`` ``(n, features)``; ``margins`` ``(n,)`` are proved; ``open`` ``(n, disjuncts)`` are the disjuncts left
    to prove.

    ``known`` are bounds of the network's values that hold in the box, ``node`` ``(n,)`` are places in the search's
    record (:mod:`~service.verification.bab.split_tree`).
    """

    box: Interval
    margins: Tensor
    open: Tensor
    known: Known
    node: Tensor

    def __len__(self) -> int:
        return len(self.margins)

    @property
    def entries(self) -> int:
        return sum(end.numel() for each in (self.box, *self.known.values()) for end in (each.lower, each.upper))

    def __getitem__(self, index: Tensor | slice) -> Boxes:
        known = {name: each.map(lambda end: end[index]) for name, each in self.known.items()}
        box = self.box.map(lambda end: end[index])
        return Boxes(box, self.margins[index], self.open[index], known, self.node[index])

    def to(self, device: torch.device) -> Boxes:
        known = {name: each.map(lambda end: end.to(device)) for name, each in self.known.items()}
        box = self.box.map(lambda end: end.to(device))
        return Boxes(box, self.margins.to(device), self.open.to(device), known, self.node.to(device))

    @staticmethod
    def join(parts: Sequence[Boxes]) -> Boxes:
        """Concatenate boxes; bounds that not all of them have are dropped."""
        if len(parts) == 1:
            return parts[0]
        names = set.intersection(*(set(part.known) for part in parts))
        known = {name: _join_intervals([part.known[name] for part in parts]) for name in sorted(names)}
        margins, left, node = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("margins", "open", "node")
        )
        return Boxes(_join_intervals([part.box for part in parts]), margins, left, known, node)


def _join_intervals(parts: Sequence[Interval]) -> Interval:
    return Interval(torch.cat([part.lower for part in parts]), torch.cat([part.upper for part in parts]))


@dataclass(frozen=True, eq=False)
class _BoxGroup:
    boxes: Boxes
    least: float
    entries: int


@dataclass(eq=False)
class BoxPool:
    """Groups of boxes; those with the smallest margin come first, or the newest if the pool is crowded.

    ``crowded_entries`` is the number of entries from which it is crowded, by kind of device.
    """

    device: torch.device
    crowded_entries: Mapping[str, int]
    groups: list[_BoxGroup] = field(default_factory=list)
    size: int = 0
    entries: int = 0

    @property
    def is_crowded(self) -> bool:
        return self.entries > self.crowded_entries.get(self.device.type, self.crowded_entries["cpu"])

    @property
    def least(self) -> float:
        return min((group.least for group in self.groups), default=torch.inf)

    def put(self, boxes: Boxes) -> None:
        if not len(boxes):
            return
        if self.is_crowded:
            boxes = replace(boxes, known={}).to(torch.device("cpu"))
        group = _BoxGroup(boxes, float(boxes.margins.min()), boxes.entries)
        self.groups.append(group)
        self._count(group, 1)

    def take(self, count: int) -> Boxes:
        """Take up to ``count`` boxes, on the device; none leaves the pool if memory runs out."""
        return self.take_as(lambda boxes: boxes, count)

    def take_as(self, form: Callable[[Boxes], T], count: int) -> T:
        """Take up to ``count`` boxes in the form that ``form`` makes; none leaves the pool if memory runs out."""
        before = list(self.groups), self.size, self.entries
        try:
            return form(self._take_groups(count))
        except BaseException:
            self.groups, self.size, self.entries = before
            raise

    def _take_groups(self, count: int) -> Boxes:
        taken: list[Boxes] = []
        while self.groups and count:
            group = self._next()
            self._count(group, -1)
            part, rest = group.boxes[:count], group.boxes[count:]
            self.put(rest)
            taken.append(part.to(self.device))
            count -= len(part)
        return Boxes.join(taken)

    def _next(self) -> _BoxGroup:
        if self.is_crowded:  # the newest are the smallest: to finish them first keeps the pool from growing
            return self.groups.pop()
        return self.groups.pop(min(range(len(self.groups)), key=lambda index: self.groups[index].least))

    def _count(self, group: _BoxGroup, sign: int) -> None:
        self.size += sign * len(group.boxes)
        self.entries += sign * group.entries


@dataclass(frozen=True, eq=False)
class BoxTransfer:
    """Hands over boxes of the pool, without the known bounds of their values.

    A row has the margin, the open disjuncts, and both ends.
    """

    pool: BoxPool
    disjunct_count: int
    features: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return 1 + self.disjunct_count + 2 * self.features

    def give(self, count: int, width: int) -> Tensor:
        def rows(boxes: Boxes) -> Tensor:
            parts = boxes.margins[:, None], boxes.open, boxes.box.lower, boxes.box.upper
            return torch.cat([part.double() for part in parts], dim=1)

        return self.pool.take_as(rows, count)

    def receive(self, rows: Tensor) -> None:
        sizes = [1, self.disjunct_count, self.features, self.features]
        margins, left, lower, upper = torch.split(rows, sizes, dim=1)
        box = Interval(lower.to(self.dtype), upper.to(self.dtype))
        node = torch.full_like(margins[:, 0], UNKNOWN, dtype=torch.int64)
        self.pool.put(Boxes(box, margins[:, 0].to(self.dtype), left > 0, {}, node))


@dataclass(frozen=True, eq=False)
class LinearCut:
    """``coefficients · x + bias ≤ rows · y − thresholds``, less the margin for rounding: ``(batch, rows, …)``."""

    coefficients: Tensor
    bias: Tensor

    @staticmethod
    def of(specification: Specification, box: Interval, coefficients: Tensor, bias: Tensor) -> LinearCut:
        """Return the cuts by planes below ``rows · y``, with the certificates' margin for rounding, in this type."""
        thresholds = specification.thresholds.to(bias.dtype)
        if specification.input_rows is not None:
            coefficients = coefficients + specification.input_rows.to(bias.dtype)
        reach = torch.maximum(box.lower.abs(), box.upper.abs()).unsqueeze(1)
        size = (coefficients.abs() * reach).sum(dim=2) + bias.abs() + thresholds.abs()
        slack = ABSOLUTE_MARGIN[bias.dtype] + RELATIVE_MARGIN[bias.dtype] * size
        return LinearCut(coefficients, _unless_undefined(bias - thresholds - slack))

    def least(self, box: Interval) -> Tensor:
        centre, radius = box.centre.unsqueeze(1), box.radius.unsqueeze(1)
        value = (self.coefficients * centre).sum(dim=2) - (self.coefficients.abs() * radius).sum(dim=2) + self.bias
        return _unless_undefined(value)


def _unless_undefined(bounds: Tensor) -> Tensor:
    """Return lower bounds with −inf in place of NaN, where nothing is known."""
    return bounds.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def clip_boxes(
    specification: Specification, cut: LinearCut, box: Interval, left: Tensor, rounds: int
) -> tuple[Interval, Tensor, Tensor]:
    """Return a smaller box, the margins ``(batch, disjuncts)`` in all of the box, and the disjuncts left to prove
    there, after ``rounds`` of cutting.

    A margin also covers the parts that were cut off: it is 0 for a disjunct that became empty that way.
    """
    margins = specification.per_disjunct(cut.least(box))
    for _ in range(rounds):
        smaller, empty = _once(specification, cut, box, left)
        left = left & ~(margins > 0) & ~empty
        inside = torch.maximum(margins, specification.per_disjunct(cut.least(smaller)))
        left = left & ~(inside > 0)
        margins = torch.where(left, inside, margins.clamp(min=0))
        box = smaller
    return box, margins, left


def _once(specification: Specification, cut: LinearCut, box: Interval, left: Tensor) -> tuple[Interval, Tensor]:
    least, slope = cut.least(box).unsqueeze(2), cut.coefficients
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    # From the corner with the least value, the distance along one input until the plane is positive.
    reach = -least / slope.abs().clamp(min=torch.finfo(slope.dtype).tiny)
    reach = reach * (1 + RELATIVE_MARGIN[slope.dtype]) + 4 * torch.finfo(slope.dtype).eps * (lower.abs() + upper.abs())
    reach = torch.where(least.isfinite(), reach, torch.inf)
    highest = torch.where(slope > 0, torch.minimum(upper, lower + reach), upper)
    lowest = torch.where(slope < 0, torch.maximum(lower, upper - reach), lower)
    highest, lowest = _of_disjuncts(specification, highest, "amin"), _of_disjuncts(specification, lowest, "amax")
    empty = (lowest > highest).any(dim=2) & left
    open_ = (left & ~empty).unsqueeze(2)
    least_end = torch.where(open_, lowest, torch.inf).amin(dim=1)
    greatest_end = torch.where(open_, highest, -torch.inf).amax(dim=1)
    some = open_.any(dim=1)
    return Interval(torch.where(some, least_end, box.lower), torch.where(some, greatest_end, box.upper)), empty


def _of_disjuncts(specification: Specification, ends: Tensor, which: str) -> Tensor:
    """Combine ``(batch, rows, features)`` into ``(batch, disjuncts, features)``: a disjunct's rows hold at once."""
    if specification.disjunct_count == ends.shape[1]:
        return ends[:, specification.disjunct.argsort()]
    index = specification.disjunct[None, :, None].expand_as(ends)
    start = ends.new_full(
        (ends.shape[0], specification.disjunct_count, ends.shape[2]), torch.inf if which == "amin" else -torch.inf
    )
    return start.scatter_reduce(1, index, ends, which)
