"""Sums over the entries of a value in a rigorous pass, and what they may be off by."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.ball import Ball
from service.bounds.operators.allowance import Step
from service.bounds.operators.base import Coefficients, UnitRows
from service.bounds.rounding import down, gamma


def least_in(ball: Ball, coefficients: Tensor) -> Tensor:
    """``A·m − d·‖A‖₂``, rounded down."""
    batch, terms = len(ball.lower), coefficients[0, 0].numel()
    distance = ball.distance.flatten(1)[:, :1]
    reach = distance * coefficients.flatten(2).expand(batch, -1, -1).norm(dim=2)
    at_middle, sizes = ball.middle.unsqueeze(1), coefficients.abs()
    # Squares below the normal numbers are lost, of which the root is far above them.
    lost = terms * 2.0**-500 * (1 + distance)
    error = gamma(terms + 8) * (weighted(sizes, at_middle.abs()) + reach) + lost
    return down(weighted(coefficients, at_middle) - reach - error)


def charge(waiting: Coefficients, step: Step) -> Tensor:
    """``|A|·error + lost``, ``(batch, rows)``."""
    if isinstance(waiting, UnitRows) and step.error.shape[1] == 1:
        entries = step.error.flatten(1)
        one = entries.gather(1, waiting.index.expand(len(entries), -1))
        charged = torch.cat([one, one], dim=1) if waiting.mirrored else one
    else:
        like = step.error
        dense = waiting if isinstance(waiting, Tensor) else waiting.dense(tuple(like.shape[2:]), like)
        charged = weighted(dense.abs(), step.error)
    return charged + step.lost.unsqueeze(1)


def weighted(coefficients: Tensor, entries: Tensor) -> Tensor:
    """``(batch or 1, rows, *shape)`` times ``(batch, rows or 1, *shape)``: ``(batch, rows)``."""
    batch = len(entries)
    flat = coefficients.flatten(2).expand(batch, -1, -1)
    if entries.shape[1] == 1:
        return torch.bmm(flat, entries.reshape(batch, -1, 1)).squeeze(-1)
    return (flat * entries.flatten(2)).sum(dim=2)
