"""Records the trees that searches split, so that they can be shown: the first domains of each, and counts of the rest.

A domain carries the number of its node. Once a tree has its most nodes, descendants of a node are only counted
there: they carry the node's number too, as :func:`_mirror` writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

OPEN, SPLIT, VERIFIED, STUCK = "open", "split", "verified", "stuck"
"""The states of a node: it waits, has two halves, is proved, or cannot be split and is not proved."""
UNKNOWN = -1
"""The node of a domain without a tree: one of another rank, or one that is not recorded."""
DIGITS = 6
"""Significant digits of recorded numbers."""
_MOST_ROWS = 8
"""A tree may have this many times the nodes that it shows; beyond, it drops finished nodes."""


def _mirror(node: int) -> int:
    """Return the number that descendants without their own nodes carry; the function is its own inverse."""
    return -node - 2


@dataclass(eq=False)
class _RecordedDomain:
    """In this domain the entry ``on`` is on the side ``side`` (1 or −1) of ``at``; a root has no such condition.

    Of the descendants without nodes, ``below`` were bounded, ``proved`` were proved and ``stuck`` got stuck.
    """

    parent: int
    on: int | None
    side: int
    at: float
    margin: float
    state: str = OPEN
    halves: tuple[int, int] | None = None
    below: int = 0
    proved: int = 0
    stuck: int = 0
    is_dropped: bool = False
    has_counterexample: bool = False

    @property
    def open_below(self) -> int:
        """Return the number of waiting domains without nodes: each split ended one and began two."""
        leaves = 1 + self.below // 2 if self.below else 0
        return max(leaves - self.proved - self.stuck, 0)


class SearchTree:
    """The tree of one search, whose roots are its disjuncts, or one box; ``most`` nodes are kept at a time.

    ``name_of`` names an entry that domains are split on. Without roots nothing is recorded.
    """

    def __init__(self, technique: str, specification: int, most: int, name_of: Callable[[int], str]) -> None:
        self.technique, self.specification, self.most, self.name_of = technique, specification, most, name_of
        self.nodes: list[_RecordedDomain] = []
        self.roots = self.kept = 0

    def plant(self, margins: Tensor) -> Tensor:
        """Add a root for each of ``margins`` ``(n,)``, as far as there is room; return their numbers."""
        self.roots = min(len(margins), self.most)
        self.nodes = [_RecordedDomain(UNKNOWN, None, 0, 0.0, margin) for margin in margins[: self.roots].tolist()]
        self.kept = self.roots
        numbers = torch.arange(len(margins), device=margins.device)
        return torch.where(numbers < self.roots, numbers, UNKNOWN)

    def split(self, parents: Tensor, on: Tensor, at: Tensor, margins: Tensor) -> Tensor:
        """Return the nodes ``(2, n)`` of the upper and the lower halves of domains, whose ``parents`` are ``(n,)``.

        ``on`` and ``at`` ``(n,)`` say where they were split; ``margins`` ``(2, n)`` are the proved margins of the
        halves.
        """
        if not self.nodes:
            return torch.full_like(margins, UNKNOWN, dtype=torch.int64)
        numbers, found = parents.tolist(), parents.repeat(2, 1)
        known = [index for index, number in enumerate(numbers) if number >= 0]
        self._count_below(numbers, lambda node, count: setattr(node, "below", node.below + 2 * count))
        if known:
            which = torch.tensor(known, device=parents.device)
            columns = (column[which].tolist() for column in (parents, on, at))
            above, below = margins[:, which].tolist()
            halves = [self._halves(*row) for row in zip(*columns, above, below, strict=True)]
            found[:, which] = torch.tensor(halves, device=parents.device).T
        return found

    def record_proofs(self, domains: Tensor, margins: Tensor) -> None:
        """Record that domains are proved, with these margins."""
        if self._end(domains, VERIFIED):
            self.tighten(domains, margins)

    def stick(self, domains: Tensor) -> None:
        """Record that domains are given up: nothing splits them further."""
        self._end(domains, STUCK)

    def tighten(self, domains: Tensor, margins: Tensor) -> None:
        """Take better margins of domains."""
        if not self.nodes:
            return
        for number, margin in zip(domains.tolist(), margins.tolist(), strict=True):
            if number >= 0:
                self.nodes[number].margin = margin

    def restart(self, disjunct: int) -> None:
        """Forget the splits of a disjunct, whose root begins anew."""
        for number in self._within(disjunct):
            node = self.nodes[number]
            if number == disjunct:
                node.state, node.halves, node.below, node.proved, node.stuck = OPEN, None, 0, 0, 0
            else:
                node.is_dropped, self.kept = True, self.kept - 1

    def finish(self, disjunct: int | None = None) -> None:
        """Record that all domains, or all of one disjunct, are proved."""
        for root in range(self.roots) if disjunct is None else [disjunct]:
            for number in self._within(root):
                node = self.nodes[number]
                node.state = VERIFIED if node.state == OPEN else node.state
                node.proved += node.open_below

    def mark(self, values: Sequence[float], roots: Sequence[int]) -> None:
        """Mark the leaves below ``roots`` in which a counterexample is, at which entries have these values."""
        for root in roots:
            if root >= self.roots:
                continue
            node = self.nodes[root]
            while node.halves is not None:
                above, below = (self.nodes[number] for number in node.halves)
                assert above.on is not None
                node = above if values[above.on] >= above.at else below
            node.has_counterexample = True

    def as_dict(self) -> dict[str, Any]:
        """Return the tree as columns, with a row for each node; parents come before their halves."""
        kept = [number for number, node in enumerate(self.nodes) if not node.is_dropped]
        row = {number: index for index, number in enumerate(kept)} | {UNKNOWN: None}
        nodes = [self.nodes[number] for number in kept]
        entries = list(dict.fromkeys(node.on for node in nodes if node.on is not None))
        place = {entry: index for index, entry in enumerate(entries)}
        return {
            "technique": self.technique,
            "specification": self.specification,
            "names": [self.name_of(entry) for entry in entries],
            "parent": [row[node.parent] for node in nodes],
            "on": [None if node.on is None else place[node.on] for node in nodes],
            "side": [node.side for node in nodes],
            "at": [_shorten(node.at) for node in nodes],
            "margin": [_shorten(node.margin) for node in nodes],
            "state": [node.state for node in nodes],
            "below": [node.below for node in nodes],
            "open_below": [node.open_below for node in nodes],
            "stuck_below": [node.stuck for node in nodes],
            "counterexample": next((index for index, node in enumerate(nodes) if node.has_counterexample), None),
        }

    def _halves(self, parent: int, on: int, at: float, above: float, below: float) -> tuple[int, int]:
        """Return the nodes of two halves; they exist if the domain was already split before memory ran out."""
        node = self.nodes[parent]
        if node.halves is not None:
            return node.halves
        if node.below or self.kept + 2 > self.most or len(self.nodes) + 2 > _MOST_ROWS * self.most:
            node.below, node.state = node.below + 2, SPLIT
            return _mirror(parent), _mirror(parent)
        first, self.kept = len(self.nodes), self.kept + 2
        self.nodes += [_RecordedDomain(parent, on, 1, at, above), _RecordedDomain(parent, on, -1, at, below)]
        node.state, node.halves = SPLIT, (first, first + 1)
        return node.halves

    def _end(self, domains: Tensor, state: str) -> bool:
        if not self.nodes or not len(domains):
            return False
        numbers = domains.tolist()
        for number in numbers:
            if number >= 0:
                self.nodes[number].state = state
        name = "proved" if state == VERIFIED else "stuck"
        self._count_below(numbers, lambda node, count: setattr(node, name, getattr(node, name) + count))
        return True

    def _count_below(self, numbers: Sequence[int], count: Callable[[_RecordedDomain, int], None]) -> None:
        for number, times in Counter(number for number in numbers if number < UNKNOWN).items():
            count(self.nodes[_mirror(number)], times)

    def _within(self, root: int) -> Iterator[int]:
        """Yield the node of a root and all below, if it has one."""
        waiting = [root] if root < self.roots else []
        while waiting:
            number = waiting.pop()
            waiting += self.nodes[number].halves or ()
            yield number


def _shorten(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else None


@dataclass(eq=False)
class SplitRecord:
    """The trees of one verdict's searches, each of at most ``most`` nodes, and the first ``most_trees`` of them."""

    most: int = 0
    most_trees: int = 8
    trees: list[SearchTree] = field(default_factory=list)
    specification: int = 0

    def begin(self, technique: str, name_of: Callable[[int], str]) -> SearchTree:
        """Return the tree of a search that begins."""
        room = self.most if len(self.trees) < self.most_trees else 0
        tree = SearchTree(technique, self.specification, room, name_of)
        if room:
            self.trees.append(tree)
        return tree

    def as_list(self) -> list[dict[str, Any]]:
        """Return the trees of searches that split anything."""
        return [tree.as_dict() for tree in self.trees if any(node.state == SPLIT for node in tree.nodes)]
