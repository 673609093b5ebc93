"""Groups the rows of a value by blocks of its entries, so that passes leave out what a group does not depend on.

An entry at one place along a dimension, such as that of a sequence's tokens, often depends on few places of earlier
values. So rows of the same places go together. A pass without rows finds out how many entries that leaves, and which
dimension leaves the fewest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import traverse_backward
from service.bounds.linear.rows.block import WORTHWHILE, Block, around, lengths, whole
from service.bounds.linear.rows.patches import Patches
from service.bounds.methods.base import elements_of_row
from service.bounds.operators import LINEAR, OPERATORS

SHARE = 0.8
"""Share of all entries that a pass goes through, above which blocks do not pay."""
LEAST = {"cpu": 2**20, "cuda": 2**28}
"""Coefficients of a group on a kind of device, of which each costs launches."""
FEWEST = {"cpu": 2**22, "cuda": 2**29}
"""Coefficients of all rows that are worth a look. On a CUDA device, fewer may be recorded, where nothing may be asked
of the device.
"""


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows ``index`` ``(batch or 1, rows)`` of a value, all of them in the ``block`` if there is one; the largest
    tensor of coefficients of one row has so many ``elements``.
    """

    index: Tensor
    block: Block | None
    elements: int


@dataclass(frozen=True, eq=False)
class RowGroups:
    """``order`` ``(rows,)`` puts the groups' rows, one group after the other, back in the order that was asked for;
    ``None`` if they are in it.
    """

    groups: tuple[RowGroup, ...]
    order: Tensor | None = None

    def ordered(self, found: Tensor) -> Tensor:
        """Return results ``(batch, rows)`` of all groups in the order of the rows."""
        return found if self.order is None else found.index_select(1, self.order)


def row_groups(backward: Pass, name: str, index: Tensor) -> RowGroups:
    """Return the entries ``index`` ``(batch or 1, rows)`` of a value in groups; in one if that is as good."""
    each = elements_of_row(backward, name)
    work = 2 * index.shape[1] * each
    together = RowGroups((RowGroup(index, None, each),))
    if work < FEWEST[backward.device.type] or not _may_have_blocks(backward, name) or len(index) > 1:
        return together
    shape = backward.network.nodes[name].shape
    dimension = _best_dimension(backward, name, shape)
    if dimension is None:
        return together
    places = index[0].div(prod(shape[dimension + 1 :]), rounding_mode="floor").remainder(shape[dimension])
    counts = places.bincount(minlength=shape[dimension]).tolist()
    order = places.argsort(stable=True)
    step = max(1, shape[dimension] * LEAST[backward.device.type] // work)
    groups, taken = list[RowGroup](), 0
    for start in range(0, shape[dimension], step):
        stop = min(start + step, shape[dimension])
        rows = sum(counts[start:stop])
        if rows:
            block = _at(shape, dimension, (start, stop))
            chosen = index[:, order[taken : taken + rows]]
            groups.append(RowGroup(chosen, block, backward.batch * _sizes(backward, name, block).largest))
        taken += rows
    return RowGroups(tuple(groups), order.argsort())


def _may_have_blocks(backward: Pass, name: str) -> bool:
    """Return whether nobody else has a part of the rows, and they are not those of an image, which stay in patches."""
    network = backward.network
    if not network.is_alone or torch.is_grad_enabled() or len(network.nodes[name].shape) < 2:
        return False
    seen, waiting = set[str](), [name]
    while waiting:
        node = network.nodes[waiting.pop()]
        seen.add(node.name)
        if not OPERATORS[node.operator].always_mixes if node is not network.graph.input else False:
            waiting += [each for each in node.inputs if each not in seen]
        elif node.operator in LINEAR and Patches in LINEAR[node.operator].backward_rules:
            return False
    return True


def _best_dimension(backward: Pass, name: str, shape: tuple[int, ...]) -> int | None:
    """Return the dimension in which one place needs the fewest entries of all that a pass goes through; ``None`` if
    those are not few.
    """
    most = SHARE * _sizes(backward, name, None).total
    found = {
        dimension: _sizes(backward, name, _at(shape, dimension, (length // 2, length // 2 + 1))).total
        for dimension, length in enumerate(shape)
        if length > 1
    }
    best = min(found, key=found.__getitem__, default=None)
    return None if best is None or found[best] > most else best


def _at(shape: tuple[int, ...], dimension: int, span: tuple[int, int]) -> Block:
    return (*whole(shape[:dimension]), span, *whole(shape[dimension + 1 :]))


def _sizes(backward: Pass, name: str, block: Block | None) -> _BlockSizes:
    """Return the sizes of a pass's coefficients for one row in a block."""
    sizes, network = _BlockSizes(backward), backward.network
    traverse_backward(network.graph.nodes[network.position[name] :: -1], {name: block}, sizes.propagate, sizes.join)
    return sizes


@dataclass(eq=False)
class _BlockSizes:
    """The arithmetic of sizes alone: the entries of the ``largest`` value, and of all; ``None`` is the whole value."""

    backward: Pass
    largest: int = field(default=1)
    total: int = field(default=0)

    def propagate(self, node: Node, block: Block | None) -> Iterable[tuple[str, Block | None]]:
        size = node.size if block is None else prod(lengths(block))
        if size >= WORTHWHILE * node.size:
            block, size = None, node.size
        self.largest, self.total = max(self.largest, size), self.total + size
        if node is self.backward.network.graph.input or node.name in self.backward.frontier:
            return ()
        return zip(node.inputs, self._before(node, block), strict=True)

    def _before(self, node: Node, block: Block | None) -> tuple[Block | None, ...]:
        if block is None:
            return (None,) * len(node.inputs)
        linear = self.backward.network.linear_operator_of(node)
        part = self.backward.relaxations[node.name].within(block) if linear is None else linear.within(node, block)
        return (None,) * len(node.inputs) if part is None else part[1]

    @staticmethod
    def join(name: str, first: Block | None, second: Block | None) -> Block | None:
        return None if first is None or second is None else around(first, second)
