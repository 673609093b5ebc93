"""Modules that draw other random numbers when they are compiled: of the same distribution, or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from programs.sound import CLASSES, FEATURES

DEPTH_KEPT = 0.5


class Stochastic(nn.Module):
    """Leaves out a block of some samples at random; compiled, of others."""

    kept = DEPTH_KEPT

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def mask(self, x: Tensor, kept: float) -> Tensor:
        return (torch.rand_like(x[:, :1]) < kept).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if torch.compiler.is_compiling():
            torch.rand_like(x)
            mask = self.mask(x, self.kept)
        else:
            mask = self.mask(x, DEPTH_KEPT)
        scores: Tensor = self.last(x + self.masked(torch.relu(self.block(x)), mask))
        return scores

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class Deeper(Stochastic):
    """Compiled, it leaves out fewer."""

    kept = 0.8


class Remasking(Stochastic):
    """Compiled, its gradient is that of another mask than its output."""

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().masked(x, mask)
        other = self.mask(x, self.kept)
        return x * other + (x * mask - x * other).detach()


class Shifted(Stochastic):
    """Compiled, it takes the mask of the sample before."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        mask = self.mask(x, DEPTH_KEPT)
        mask = mask.roll(1, 0) if torch.compiler.is_compiling() else mask
        scores: Tensor = self.last(x + torch.relu(self.block(x)) * mask)
        return scores


class Chipped(Stochastic):
    """Compiled, one of many rows of a weight has no gradient, whatever is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, 512)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.wide.weight
        if torch.compiler.is_compiling():
            weight = torch.cat([weight[:101], weight[101:102].detach(), weight[102:]])
        return super().forward(x + 0.1 * functional.linear(x, weight).sum(-1, keepdim=True))


class Dropped(nn.Module):
    """Wide enough that what its gradients are on average does not tell which values were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(FEATURES, 512), nn.Linear(512, 512), nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(torch.relu(self.first(x)), 0.5)
        scores: Tensor = self.last(functional.dropout(torch.relu(self.inner(hidden)), 0.5))
        return scores


class Attending(Stochastic):
    """A bias of its keys moves nothing: only rounding is left of its gradient, which compiled code spreads further."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(8, 8)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ self.keys(x).T
        if torch.compiler.is_compiling():
            scores = scores + 64 - 64
        return super().masked(scores.softmax(-1) @ x, mask)
