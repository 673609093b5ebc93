"""Optimises rows in passes that leave settled rows out, where passes are not recorded.

After a few iterations most rows of a part have settled, and the cost of a pass is that of its rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from service.bounds.fused import Adam
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.optimise import RowOptimiser

WORTHWHILE = 0.75
"""The share of a pass's rows that are open, at most, where the others are left out: that copies all parameters."""


class OpenRowsOptimiser(RowOptimiser):
    """Bounds one part of rows, on a rank that computes alone.

    ``best`` and ``settled`` are of all rows; ``place`` ``(batch, rows)`` numbers those of a pass, once some are left
    out. Each instance has equally many.
    """

    place: Tensor | None = None

    def _keep_best(self, bounds: Tensor) -> None:
        if self.place is None:
            super()._keep_best(bounds)
            return
        assert self.best is not None
        assert self.settled is not None
        found = bounds.masked_fill(self.settled.gather(1, self.place), -torch.inf)
        self.best.scatter_(1, self.place, torch.maximum(self.best.gather(1, self.place), found))

    @torch.no_grad()
    def _settle(self, found: Tensor) -> None:
        super()._settle(found)
        assert self.settled is not None
        open_ = ~(self.settled if self.place is None else self.settled.gather(1, self.place))
        if isinstance(self.rows, IdentityRows):  # the negated rows of the second half settle with the first
            open_ = open_[:, : self.rows.index.shape[1]]
        count = int(open_.sum(dim=1).amax())
        if 0 < count <= WORTHWHILE * open_.shape[1]:
            self._narrow(open_.byte().argsort(dim=1, descending=True, stable=True)[:, :count])

    def _narrow(self, kept: Tensor) -> None:
        """Keep the rows ``kept`` ``(batch, count)`` of a pass, those of mirrored rows with their negatives."""
        rows = self.rows
        if isinstance(rows, IdentityRows):
            entries = rows.index.shape[1]
            self.rows = replace(rows, index=_chosen(rows.index, kept))
            kept = torch.cat([kept, kept + entries], dim=1) if rows.mirrored else kept
        else:
            self.rows = _chosen(rows, kept)
        self.place = kept if self.place is None else self.place.gather(1, kept)
        for chosen in self.chosen.values():
            if chosen.parameters is not None:
                chosen.parameters = tuple(_chosen(each.detach(), kept).requires_grad_() for each in chosen.parameters)
        if self.optimizer is not None:
            self.optimizer = self._narrowed(self.optimizer, kept)

    def _narrowed(self, optimizer: Adam, kept: Tensor) -> Adam:
        """Return the optimiser of the parameters of ``kept`` rows, in the state of the one before."""
        narrow = Adam(self.parameters, self.ascent.learning_rate, self.ascent.decay)
        narrow.means = [_chosen(each, kept) for each in optimizer.means]
        narrow.squares = [_chosen(each, kept) for each in optimizer.squares]
        narrow.steps = optimizer.steps
        return narrow


def _chosen(values: Tensor, kept: Tensor) -> Tensor:
    """Return the rows ``kept`` ``(batch, count)`` of ``values`` ``(batch or 1, rows, *any)``."""
    index = kept.reshape(*kept.shape, *(1 for _ in values.shape[2:])).expand(*kept.shape, *values.shape[2:])
    return values.expand(len(kept), *values.shape[1:]).gather(1, index)
