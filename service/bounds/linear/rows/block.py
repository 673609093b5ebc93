"""Represents rows that are zero outside of a block of a value's entries.

An entry that belongs to one token of a sequence depends, until the last attention before it, on that token alone, and
behind a causal mask on no later token. Each operator tells what its block says of its inputs; nothing is known of
tokens here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.linear.rows.structured import StructuredRows

Span = tuple[int, int]
"""The first entry along a dimension, and the one behind the last."""
Block = tuple[Span, ...]
"""A span for each dimension of an instance."""
WORTHWHILE = 0.9
"""Share of the entries above which a block does not pay."""


def lengths(block: Iterable[Span]) -> tuple[int, ...]:
    """Return the shape of a block."""
    return tuple(stop - start for start, stop in block)


def whole(shape: Iterable[int]) -> Block:
    """Return the block of all entries."""
    return tuple((0, length) for length in shape)


def around(first: Block, second: Block) -> Block:
    """Return the smallest block that holds both."""
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def before_broadcast(block: Block, shape: tuple[int, ...]) -> Block:
    """Return the block of a value of this shape, which is broadcast to the one that the block is of."""
    last = block[len(block) - len(shape) :]
    return tuple((0, 1) if length == 1 else span for span, length in zip(last, shape, strict=True))


def enclosing(marked: Tensor, block: Block) -> Block:
    """Return the smallest block that holds all marked entries of a block, bool ``(*shape)`` on the host."""
    inside, found = in_block(marked, block), list[Span]()
    for dimension, (start, _) in enumerate(block):
        others = [each for each in range(len(block)) if each != dimension]
        along = (inside.any(dim=others) if others else inside).nonzero()
        first, last = (int(along[0]), int(along[-1])) if len(along) else (0, 0)
        found.append((start + first, start + last + 1))
    return tuple(found)


def in_block(values: Tensor, block: Block) -> Tensor:
    """Return the entries ``(*leading, *block)`` of values, which may be broadcast along the dimensions of the block."""
    for dimension, (start, stop) in enumerate(reversed(block), 1):
        if dimension <= values.ndim and values.shape[-dimension] != 1 and stop - start != values.shape[-dimension]:
            values = values.narrow(-dimension, start, stop - start)
    return values


@dataclass(frozen=True, eq=False)
class BlockRows(StructuredRows):
    """``values`` ``(b, rows, *lengths)`` in a ``block``."""

    values: Tensor
    block: Block

    def is_worthwhile(self, shape: tuple[int, ...]) -> bool:
        return prod(lengths(self.block)) < WORTHWHILE * prod(shape)

    def dense(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._within(whole(shape))

    def plus(self, other: StructuredRows) -> BlockRows | None:
        """Return the sum in the block around both."""
        if not isinstance(other, BlockRows):
            return None
        if self.block == other.block:
            return replace(self, values=self.values + other.values)
        block = around(self.block, other.block)
        first, second = (each.values for each in (self, other))
        batch = max(len(first), len(second))
        total = first.new_zeros(batch, first.shape[1], *lengths(block))
        in_block(total, self._moved(block)).copy_(first)
        in_block(total, other._moved(block)).add_(second)
        return BlockRows(total, block)

    def cut(self, block: Block) -> BlockRows:
        """Return the values in a block within theirs; the others are 0."""
        return BlockRows(in_block(self.values, BlockRows(self.values, block)._moved(self.block)), block)

    def _moved(self, around_it: Block) -> Block:
        """Return the block, counted from the start of one that holds it."""
        return tuple((a - first, b - first) for (a, b), (first, _) in zip(self.block, around_it, strict=True))

    def _within(self, block: Block) -> Tensor:
        """Return the values in a block that holds theirs."""
        sides = [
            side
            for (start, stop), (first, last) in zip(reversed(self.block), reversed(block), strict=True)
            for side in (start - first, last - stop)
        ]
        return functional.pad(self.values, sides) if any(sides) else self.values


def units(index: Tensor, block: Block, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return rows of the identity over the entries ``index`` ``(b, rows)`` of a value, in a block that holds them."""
    place, left = torch.zeros_like(index), index
    inner = 1
    for (start, stop), length in zip(reversed(block), reversed(shape), strict=True):
        place += (left.remainder(length) - start) * inner
        left, inner = left // length, inner * (stop - start)
    rows = torch.zeros(*index.shape, inner, dtype=like.dtype, device=like.device)
    rows.scatter_(2, place.unsqueeze(2), 1)
    return rows.reshape(*index.shape, *lengths(block))


def reshaped(block: Block, shape: tuple[int, ...], into: tuple[int, ...]) -> Block | None:
    """Return the block of a value's other shape ``into`` that has the same entries in the same order; ``None`` if that
    is no block.

    Dimensions of both shapes that hold the same entries belong together: single ones, or some that must be whole but
    for the first, where they become a single one.
    """
    if 0 in shape:
        return None
    found = list[tuple[int, int]]()
    here, there = 0, 0
    while here < len(shape) or there < len(into):
        if here < len(shape) and shape[here] == 1:
            here += 1
            continue
        if there < len(into) and into[there] == 1:
            found.append((0, 1))
            there += 1
            continue
        first, second = here + 1, there + 1
        sizes = [prod(shape[here:first]), prod(into[there:second])]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0], first = sizes[0] * shape[first], first + 1
            else:
                sizes[1], second = sizes[1] * into[second], second + 1
        joined = _joined(block[here:first], shape[here:first], into[there:second])
        if joined is None:
            return None
        found += joined
        here, there = first, second
    return tuple(found)


def _joined(block: Block, shape: tuple[int, ...], into: tuple[int, ...]) -> Block | None:
    """Return the block of dimensions ``into`` that hold the same entries as those of ``shape``."""
    if shape == into:
        return block
    if block[1:] != whole(shape[1:]):
        return None
    if len(into) == 1:
        inner = prod(shape[1:])
        return ((block[0][0] * inner, block[0][1] * inner),)
    return whole(into) if block == whole(shape) else None
