"""Halfspaces of hidden values, ``z ≥ at`` or ``z ≤ at``, in linear bounds (beta-CROWN, Wang et al., 2021; GenBaB).

A split tightens the bounds of one entry of a value, and so the relaxations that read it. Its constraint enters the
bound with a multiplier (β of the papers), and so does the entry's other bound, which still helps when the operator that
reads it leaves nothing to relax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.fused import FreeSlopes, propagate_free_slopes
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.operators.pieces import TwoPieces
from service.bounds.relaxation import Lines, Relaxation, Relaxed


@dataclass(frozen=True)
class Preactivation:
    """A value that non-linear operators read. ``reader`` is the first of them, and the value its input ``position``.

    Entries of all preactivations are numbered consecutively; those of this one begin at ``offset``.
    """

    value: str
    reader: str
    position: int
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Preactivations:
    """All preactivations of a network, in execution order."""

    each: tuple[Preactivation, ...]

    @classmethod
    def of(cls, network: Network) -> Preactivations:
        found: dict[str, Preactivation] = {}
        offset = 0
        for node in network.nonlinear:
            for position, value in enumerate(node.inputs):
                if value not in found:
                    found[value] = Preactivation(value, node.name, position, node.input_shapes[position], offset)
                    offset += found[value].size
        return cls(tuple(found.values()))

    @property
    def entries(self) -> int:
        return sum(preactivation.size for preactivation in self.each)

    @property
    def sizes(self) -> list[int]:
        return [preactivation.size for preactivation in self.each]

    def numbers(self, device: torch.device) -> Tensor:
        """Return the number of the preactivation of every entry, int64 ``(entries,)``."""
        sizes = torch.tensor(self.sizes, dtype=torch.int64)
        return torch.arange(len(self.each)).repeat_interleave(sizes).to(device)

    def unflattened(self, entries: Tensor) -> dict[str, Tensor]:
        """Return ``(batch, entries)`` as ``(batch, *shape)`` of each value."""
        parts = torch.split(entries, self.sizes, dim=1)
        return {
            preactivation.value: part.reshape(len(part), *preactivation.shape)
            for preactivation, part in zip(self.each, parts, strict=True)
        }

    def bounds(self, inputs: Mapping[str, Sequence[Interval]]) -> Interval:
        """Return the bounds of every non-linear node's inputs as ``(batch, entries)``."""
        each = [inputs[preactivation.reader][preactivation.position] for preactivation in self.each]
        lower, upper = (
            [by_instance(end) for end in ends] for ends in zip(*((i.lower, i.upper) for i in each), strict=True)
        )
        return Interval(torch.cat(lower, dim=1), torch.cat(upper, dim=1))

    def flattened(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return values flattened, as the inverse of :meth:`unflattened`."""
        return torch.cat([by_instance(values[preactivation.value]) for preactivation in self.each], dim=1)


def breakpoint_of(network: Network, preactivation: Preactivation) -> float | None:
    """Return the point at which a split leaves the preactivation's reader without any relaxation, if it exists."""
    node = network.nodes[preactivation.reader]
    return network.operator_of(node).breakpoint(node, preactivation.position)


@dataclass(frozen=True, eq=False)
class Splits:
    """``sign·(z − at) ≥ 0`` for the entries ``index``; a sign of 0 is no split. All are ``(batch, depth)``.

    ``index`` is int64 over the entries of all preactivations, the others have the bounds' dtype.
    """

    index: Tensor
    sign: Tensor
    at: Tensor

    def clipped(self, bounds: Interval) -> Interval:
        """Return bounds ``(batch or 1, entries)`` of all preactivations on the set where the splits hold; ends
        cross if that set is empty.
        """
        batch = len(self.index)
        above = torch.where(self.sign > 0, self.at, -torch.inf)
        below = torch.where(self.sign < 0, self.at, torch.inf)
        return Interval(
            bounds.lower.expand(batch, -1).scatter_reduce(1, self.index, above, "amax"),
            bounds.upper.expand(batch, -1).scatter_reduce(1, self.index, below, "amin"),
        )


@dataclass(frozen=True, eq=False)
class Multipliers:
    """``values`` δ of any sign, ``(batch, depth)``, for the entries ``index``, whose bounds are ``held``.

    a·z = (a − δ)·z + δ·z, and δ·z is at least its least value between the bounds.
    """

    values: Tensor
    index: Tensor
    held: Interval

    def coefficients(self, entries: int) -> Tensor:
        """Return the additions to the coefficients of all preactivations, ``(batch, entries)``."""
        return self.values.new_zeros(len(self.values), entries).scatter_add(1, self.index, -self.values)

    def biases(self, preactivation: Tensor, preactivations: int) -> Tensor:
        """Return the additions to the bias, ``(batch, preactivations)``; without a gradient, see ``ascent_direction``.

        ``preactivation`` ``(batch, depth)`` numbers those of the entries.
        """
        values = self.values.detach()
        least = torch.where(values > 0, self.held.lower, self.held.upper) * values
        # Without a multiplier there is no term, even if there is no bound.
        least = torch.where(values == 0, torch.zeros_like(least), least)
        return least.new_zeros(len(least), preactivations).scatter_add(1, preactivation, least)

    def ascent_direction(self, gradient: Tensor) -> Tensor:
        """Return the direction of ascent, from the coefficients' ``gradient`` alone: at 0 the bias has a kink.

        0 if neither sign gains anything.
        """
        up, down = gradient + self.held.lower, gradient + self.held.upper
        at_zero = torch.where(up > 0, up, torch.where(down < 0, down, torch.zeros_like(up)))
        return torch.where(self.values > 0, up, torch.where(self.values < 0, down, at_zero)).nan_to_num(0, 0, 0)


@dataclass(frozen=True, eq=False)
class Places:
    """Entries ``index`` ``(places,)`` of a value; ``open_`` and ``closed`` ``(1, entries)`` are their codes, int32,
    as :class:`~service.bounds.fused.FreeSlopes` takes them: for entries whose place is in use, and for those whose
    place is not.
    """

    index: Tensor
    open_: Tensor
    closed: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Places:
        """Return the entries that are set in any instance of ``mask`` ``(batch, *shape)``."""
        chosen = by_instance(mask).any(dim=0, keepdim=True)
        open_ = torch.where(chosen, chosen.cumsum(dim=1) - 1, -1).to(torch.int32)
        return cls(chosen[0].nonzero().squeeze(1), open_, -2 - open_)


@dataclass(frozen=True, eq=False)
class PiecewiseSlopes:
    """The relaxations of a function of two pieces that meet at 0, with free lower slopes at some places.

    A family of :class:`~service.bounds.relaxation.Relaxed` whose parameters are for the same entries whatever the
    bounds are: domains of one search agree on them. The parameter of an entry that is not open has no effect.
    ``codes`` are ``(batch, entries)``, ``index`` ``(places,)``.
    """

    relaxation: Relaxation
    codes: Tensor
    index: Tensor
    flattest: float

    @classmethod
    def on(cls, pieces: TwoPieces, bounds: Interval, places: Places) -> PiecewiseSlopes:
        open_ = by_instance(pieces.unstable(bounds))
        codes = torch.where(open_, places.open_, places.closed)
        return cls(pieces.relax(bounds), codes, places.index, pieces.slope)

    @property
    def start(self) -> tuple[Tensor, ...]:
        slopes = by_instance(self.relaxation.lower_slope).index_select(1, self.index)
        return (((slopes - self.flattest) / (1 - self.flattest or 1)).clamp(0, 1),)

    def member(self, parameters: tuple[Tensor, ...]) -> Lines:
        fixed = self.relaxation.lower_slope
        free = self.flattest + (1 - self.flattest) * parameters[0]
        rows = free.shape[1]
        whole = by_instance(fixed).unsqueeze(1).expand(-1, rows, -1).index_copy(2, self.index, free)
        open_ = (self.codes >= 0).unsqueeze(1)
        lower = torch.where(open_, whole, by_instance(fixed).unsqueeze(1)).reshape(len(fixed), rows, *fixed.shape[1:])
        assert self.relaxation.upper_intercept is not None
        upper = self.relaxation.upper_slope.unsqueeze(1), self.relaxation.upper_intercept.unsqueeze(1)
        return Lines(lower, upper[0], None, upper[1])

    def fused_member(self, parameters: tuple[Tensor, ...]) -> FreeSlopeLines:
        """Return the member for passes alone."""
        relaxation, shape = self.relaxation, tuple(self.relaxation.lower_slope.shape[1:])
        assert relaxation.upper_intercept is not None
        lines = relaxation.lower_slope, relaxation.upper_slope, relaxation.upper_intercept
        index = self.index.expand(len(self.codes), -1)
        free = FreeSlopes(shape, self.flattest, index, self.codes, *(by_instance(each) for each in lines))
        return FreeSlopeLines(free, parameters[0])


@dataclass(frozen=True, eq=False)
class FreeSlopeLines(Relaxed):
    """Lines with free slopes ``(batch, rows, places)``, in as few steps as possible."""

    free: FreeSlopes
    parameters: Tensor

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        through, bias = propagate_free_slopes(coefficients, self.free, self.parameters)
        return (through,), bias
