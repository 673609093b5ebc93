"""Bounds functions of two pieces over a box and a ball together, by one multiplier for each row (SDP-CROWN; Chiu, Chen,
Zhang and Zhang, 2025, theorem 1; here with the box).

Let f be ``max(z, 0) + s·min(z, 0)``, entry by entry, and let the values z be in a box [l, u] and at most ρ from c in
Euclidean distance. For any slopes g and any λ ≥ 0, all such z have

    ``a·f(z) ≥ g·z + Σ_i m_i(λ) − λρ²/2``,
    ``m_i(λ) = min over x in [l_i, u_i] of a_i·f(x) − g_i·x + λ/2·(x − c_i)²``,

since ``Σ_i m_i(λ) ≤ a·f(z) − g·z + λ/2·‖z − c‖²`` by the choice ``x = z_i``, and ``λ/2·(‖z − c‖² − ρ²) ≤ 0``. So the
sum is an offset of the linear bound ``g·z``, whatever λ ≥ 0 is: weak duality. It is concave in λ, and λ = 0 gives the
best offset that the box alone allows, so the best λ is never worse than a relaxation of each entry by itself. Over a
whole ball around 0 it is better by a factor of up to √n for n entries: all of them cannot be ρ away at once.

On each side of 0, m_i is the least value of a parabola on an interval. So one search for λ in each row is all that is
left: the derivative is ``(‖x(λ) − c‖² − ρ²)/2`` for the minimisers x(λ), and falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.patches import Patches
from service.bounds.relaxation import Changed, Family, PatchFamily, Relaxed, Single

MANY = 256
"""Entries among which it pays to look for open ones."""
HALVINGS, OCTAVES = 8, 16
"""Halvings of a range of multipliers, and the range: powers of 2 below the largest that may be the best."""


@dataclass(frozen=True, eq=False)
class NearPieces:
    """A function of two pieces, with slopes 1 and ``slope``, on values in a box and in a ball.

    ``lower``, ``upper`` and ``centre`` are ``(batch or 1, rows or 1, *shape)``, ``radius`` is ``(batch or 1,)``.
    """

    slope: float
    lower: Tensor
    upper: Tensor
    centre: Tensor
    radius: Tensor

    def offset(self, coefficients: Tensor, through: Tensor) -> Tensor:
        """Return offsets ``(batch, rows)`` of the bounds ``through · z`` of ``coefficients · f(z)``.

        Both are ``(batch or 1, rows, *shape)``. Where the box has only one piece, the slopes are that piece's.
        """
        # What is derived from tensors holds for this call alone: recorded passes overwrite them.
        return replace(self)._offset(by_row(coefficients), by_row(through))

    def _offset(self, coefficients: Tensor, through: Tensor) -> Tensor:
        a, g = (self._chosen(each.detach()) for each in (coefficients, through))
        below, above = self.slope * a - g, a - g
        multiplier = self._multiplier(below, above)
        x = self._minimiser(below, above, multiplier)
        penalty = ((x - self._box[2]) ** 2).sum(dim=2) - self.radius[:, None] ** 2
        # At a minimiser, the derivative of the least value is that of the terms alone.
        terms = self._chosen(coefficients) * torch.where(x > 0, x, self.slope * x)
        return (terms - self._chosen(through) * x).sum(dim=2) + multiplier.squeeze(2) / 2 * penalty

    @property
    def is_idle(self) -> bool:
        """Return whether the ball holds all that the boxes leave open in every instance, so that no offset gains
        anything; on a device, and for few entries, nobody asks.
        """
        if self._places is None:
            return False
        lower, upper, centre = (values[:, 0] for values in replace(self)._box)
        far = torch.where((lower < 0) & (upper > 0), torch.maximum(centre - lower, upper - centre), 0.0)
        return bool((far.norm(dim=1) <= self.radius).all())

    def shown(self, patches: Patches) -> NearPieces:
        """Return the same for the entries in patches: the others have no coefficients."""
        ends = self.lower, self.upper, self.centre.expand_as(self.lower)
        lower, upper, centre = patches.of_each(*(each.squeeze(1) for each in ends))
        return replace(self, lower=lower, upper=upper, centre=centre)

    @torch.no_grad()
    def _multiplier(self, below: Tensor, above: Tensor) -> Tensor:
        """Return nearly the best multiplier of each row, ``(batch, rows, 1)``.

        No minimiser is further than ``2·max(|below|, |above|)/λ`` from the centre, so none above ``high`` is best.
        """
        is_open = (self._box[0] < 0) & (self._box[1] > 0)
        steepest = (torch.maximum(below.abs(), above.abs()) * is_open).norm(dim=2)
        tiny = torch.finfo(below.dtype).tiny ** 0.5
        high = (2 * steepest / self.radius[:, None].clamp(min=tiny)).clamp(min=tiny).unsqueeze(2)
        exponent, step = torch.zeros_like(high), OCTAVES / 2
        for _ in range(HALVINGS):
            middle = exponent - step
            x = self._minimiser(below, above, high * torch.exp2(middle))
            is_far = ((x - self._box[2]) ** 2).sum(dim=2, keepdim=True) > self.radius[:, None, None] ** 2
            exponent, step = torch.where(is_far, exponent, middle), step / 2
        found: Tensor = high * torch.exp2(exponent)
        return found

    @torch.no_grad()
    def _minimiser(self, below: Tensor, above: Tensor, multiplier: Tensor) -> Tensor:
        """Return the entries x at which the terms and the penalty are least together, ``(batch, rows, entries)``."""
        lower, upper, centre = self._box
        left = (centre - below / multiplier).clamp(min=lower).clamp(max=upper.clamp(max=0))
        right = (centre - above / multiplier).clamp(max=upper).clamp(min=lower.clamp(min=0))
        on_left, on_right = (
            slope * x + multiplier / 2 * (x - centre) ** 2 for slope, x in ((below, left), (above, right))
        )
        # A side that the box excludes ends at its nearest end, where the function is not this piece.
        is_left = torch.where(upper <= 0, True, (on_left < on_right) & (lower < 0))
        return torch.where(is_left, left, right)

    @cached_property
    def _places(self) -> Tensor | None:
        """Return the entries that are open in some instance: the others have exact bounds. All are taken if they are
        few, and on a device, which would have to tell the host how many there are.
        """
        if self.lower.device.type != "cpu" or self.lower.shape[1] > 1 or self.lower[0].numel() < MANY:
            return None
        return by_row((self.lower < 0) & (self.upper > 0)).flatten(0, 1).any(dim=0).nonzero().squeeze(1)

    def _chosen(self, values: Tensor) -> Tensor:
        return values if self._places is None else values.index_select(2, self._places)

    @cached_property
    def _box(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chosen entries of the ends, and of the centre, moved into the box where rounding left it."""
        lower, upper, centre = (self._chosen(by_row(each)) for each in (self.lower, self.upper, self.centre))
        return lower, upper, torch.minimum(torch.maximum(centre, lower), upper)


@dataclass(frozen=True, eq=False)
class NearRelaxed(Relaxed):
    """A relaxation with the better of its own offsets and those of ``near``."""

    relaxed: Relaxed
    near: NearPieces

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        (through,), bias = self.relaxed.backward(coefficients)
        return (through,), self._better(bias, self.near, coefficients, through)

    @backward_rule(Patches)
    def backward_patches(self, patches: Patches) -> Propagated | None:
        step = self.relaxed.propagate_backward(patches)
        if step is None:
            return None
        (through,) = step.coefficients
        assert isinstance(through, Patches)
        near = self.near.shown(patches)
        return Propagated((through,), self._better(step.bias, near, patches.values, through.values))

    @staticmethod
    def _better(bias: Tensor | None, near: NearPieces, coefficients: Tensor, through: Tensor) -> Tensor | None:
        if bias is None:
            return None
        offset = near.offset(coefficients, through)
        return torch.where(offset > bias, offset, bias)  # NaN is greater than nothing


def with_offsets(relaxations: Mapping[str, Relaxed], near: Mapping[str, NearPieces]) -> dict[str, Relaxed]:
    """Return relaxations, by node, with the offsets of what is known of their inputs."""
    return {name: NearRelaxed(each, near[name]) if name in near else each for name, each in relaxations.items()}


@dataclass(frozen=True, eq=False)
class _NearPatchFamily(Changed):
    patch_family: PatchFamily
    near: NearPieces

    def shown(self, patches: Patches) -> Family:
        return Changed(self.patch_family.shown(patches), partial(NearRelaxed, near=self.near.shown(patches)))


def near_family(family: Family, near: NearPieces) -> Family:
    """Return the family with offsets of ``near``; it exists for patches if the family does."""
    change = partial(NearRelaxed, near=near)
    if isinstance(family, Single):
        return Single(change(family.relaxed), family.start)
    if isinstance(family, PatchFamily):
        return _NearPatchFamily(family, change, family, near)
    return Changed(family, change)
