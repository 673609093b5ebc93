"""Represents rows of the identity matrix, with which the bounding of a value's entries begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.linear.rows.block import Block, BlockRows, units
from service.bounds.linear.rows.patches import Patches, image_of
from service.bounds.linear.rows.structured import StructuredRows


@dataclass(frozen=True, eq=False)
class IdentityRows(StructuredRows):
    """Rows of the identity over a node's entries, never materialised where a layer can give its own rows instead.

    ``index`` ``(batch or 1, rows)`` counts entries of one flattened instance. With ``mirrored`` the negated rows
    follow, whose lower bounds are minus the upper bounds. ``block`` holds all entries, where one is given: the rows
    then stay in blocks as long as they can, and else in patches.
    """

    index: Tensor
    mirrored: bool = True
    block: Block | None = None

    @property
    def count(self) -> int:
        return self.index.shape[1] * (2 if self.mirrored else 1)

    def select(self, entries: Tensor) -> Tensor:
        """Return ``(batch or 1, count, …)`` rows of ``entries`` ``(n, …)``."""
        rows = entries[self.index]
        return torch.cat([rows, -rows], dim=1) if self.mirrored else rows

    def wider_kind(self, shape: tuple[int, ...]) -> type[BlockRows | Patches] | None:
        """Return that of rows in their block, or patches of one place if the value is an image."""
        if self.block is not None:
            return BlockRows
        return None if image_of(shape) is None else Patches

    def wider(self, shape: tuple[int, ...], like: Tensor) -> BlockRows | Patches | None:
        """Return the rows in their block, or patches of one place if the value is an image ``(…, channels, height,
        width)``.
        """
        if self.block is not None:
            rows = units(self.index, self.block, shape, like)
            return BlockRows(torch.cat([rows, -rows], dim=1) if self.mirrored else rows, self.block)
        if image_of(shape) is None:
            return None
        channels = torch.zeros(*self.index.shape, shape[-3], 1, 1, dtype=like.dtype, device=like.device)
        channel = (self.index // (shape[-2] * shape[-1]))[..., None, None, None]
        return self.around(channels.scatter(2, channel, 1), (shape[-2], shape[-1]))

    def around(self, values: Tensor, grid: tuple[int, int]) -> Patches:
        """Return ``values`` ``(b, rows, channels, height, width)`` as patches at the rows' entries."""
        both = torch.cat([values, -values], dim=1) if self.mirrored else values
        return Patches.at(self.index.repeat(1, 2) if self.mirrored else self.index, both, grid)

    def dense(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = int(torch.Size(shape).numel())
        rows = torch.zeros(*self.index.shape, size, dtype=like.dtype, device=like.device)
        rows.scatter_(2, self.index.unsqueeze(2), 1)
        rows = torch.cat([rows, -rows], dim=1) if self.mirrored else rows
        return rows.reshape(len(self.index), self.count, *shape)
