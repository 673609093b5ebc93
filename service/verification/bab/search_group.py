"""Lets ranks search one specification together: each has its own subproblems, and once per round they synchronise.

That is one small all-gather. It gives every rank the status of all, so that all end together. It also shows which ranks
have too few subproblems, and others hand some over (:mod:`~service.verification.bab.work_sharing`). What all of them
need, as bounds that all subproblems share, they divide, and take the best of what each found. A group of one rank does
none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import is_out_of_memory
from service.bounds.rank_group import RankGroup
from service.parallel.collectives import max_over_group
from service.parallel.mesh import SINGLE, Axis
from service.verification.bab.specification import Counterexample
from service.verification.bab.work_sharing import Move, plan_moves


@dataclass(frozen=True)
class SearchStatus:
    """The status of a rank, or of all: subproblems that wait and that were bounded, and the least margin of all.

    ``stuck`` says that a domain was given up, ``late`` that the time is over, ``is_slow`` that the search takes
    long. ``width`` is the number of numbers of a domain in transfer; ``is_over`` says that more time would
    change nothing. A round takes up to ``round`` domains. ``in_transit`` are the domains that a rank handed over, less
    those that it got: over all ranks, those that are nowhere, which count as open. ``seconds`` have gone by, on some
    rank.
    """

    open: int = 0
    domains: int = 0
    bound: float = inf
    stuck: bool = False
    late: bool = False
    is_slow: bool = False
    width: int = 0
    is_over: bool = False
    round: int = 1
    in_transit: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class GroupState:
    """The state that all ranks know after a round: all statuses, a counterexample if there is one, and the moves."""

    all: SearchStatus
    counterexample: Counterexample | None
    moves: tuple[Move, ...] = ()

    def handed_over(self, rank: int) -> int:
        """Return how many domains ``rank`` hands over."""
        return sum(move.count for move in self.moves if move.sender == rank)


class WorkTransfer(Protocol):
    """A rank's open subproblems, which can be handed over as rows of numbers."""

    def give(self, count: int, width: int) -> Tensor:
        """Take out ``count`` subproblems: float64 ``(count, width)``, where ``width`` is at least their own.

        If memory runs out, all of them stay.
        """

    def receive(self, rows: Tensor) -> None:
        """Put in the subproblems that another rank gave."""


@dataclass(frozen=True)
class SearchGroup:
    """The ranks of ``axis``, which all call the same in order; at most ``most_moved`` numbers move in a round."""

    axis: Axis = SINGLE
    most_moved: int = 2**23

    @property
    def is_first(self) -> bool:
        return self.axis.rank == 0

    @cached_property
    def _ranks(self) -> RankGroup:
        return RankGroup(self.axis)

    def first(self, counterexample: Counterexample | None, device: torch.device) -> Counterexample | None:
        """Return the counterexample of the lowest rank that has one; each rank passes its own."""
        if self.axis.size == 1:
            return counterexample
        lengths = self._gather_numbers([0 if counterexample is None else len(counterexample)], device)[:, 0].tolist()
        finder = next((rank for rank, length in enumerate(lengths) if length), None)
        if finder is None:
            return None
        x = torch.zeros(int(lengths[finder]), dtype=torch.float64, device=device)
        if finder == self.axis.rank and counterexample is not None:
            x = torch.tensor(counterexample, dtype=torch.float64, device=device)
        return tuple(self._ranks.sum(x).tolist())

    def anywhere(self, flag: bool, device: torch.device) -> bool:
        """Return whether any rank has set the flag."""
        return bool(self._ranks.largest(int(flag), device))

    def synchronise(
        self, status: SearchStatus, counterexample: Counterexample | None, device: torch.device
    ) -> GroupState:
        """Exchange the status of all ranks, and plan the moves."""
        if self.axis.size == 1:
            return GroupState(status, counterexample)
        numbers = [float(getattr(status, each.name)) for each in fields(SearchStatus)]
        opens, domains, bounds, stuck, late, is_slow, widths, over, rounds, transits, seconds = self._gather_numbers(
            numbers, device
        ).T.tolist()
        width, flags = int(max(widths)), (any(stuck), any(late), any(is_slow))
        open_, round_ = int(sum(opens) + sum(transits)), int(sum(rounds))
        everyone = SearchStatus(
            open_, int(sum(domains)), min(bounds), *flags, width, any(over), round_, seconds=max(seconds)
        )
        most = self.most_moved // max(1, width)
        moves = plan_moves([int(count) for count in opens], [int(count) for count in rounds], most)
        return GroupState(everyone, self.first(counterexample, device), moves)

    def rebalance(self, state: GroupState, transfer: WorkTransfer, device: torch.device) -> list[Tensor]:
        """Carry out the planned moves, and return the rows for this rank.

        If a rank has no memory for them, all rows go back to their senders.
        """
        if not state.moves:
            return []
        given, everything = list[Tensor](), None
        try:
            everything = torch.zeros(
                sum(move.count for move in state.moves), state.all.width, dtype=torch.float64, device=device
            )
            for move, place in _places(state.moves):
                if move.sender == self.axis.rank:
                    given.append(transfer.give(move.count, state.all.width))
                    everything[place] = given[-1].to(device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            everything = None
        if self.anywhere(everything is None, device):
            return given
        assert everything is not None
        everything = self._ranks.sum(everything)
        return [everything[place] for move, place in _places(state.moves) if move.receiver == self.axis.rank]

    def own(self, entries: Tensor) -> Tensor:
        """Return this rank's part of some work that all ranks divide: every rank passes the same entries."""
        return entries[self.axis.rank :: self.axis.size]

    def tightest(self, bounds: Interval) -> Interval:
        """Return the best ends that any rank found of the same values; they may cross."""
        if self.axis.size == 1:
            return bounds
        proper = bounds.without_nan()
        return Interval(*(sign * self.most(sign * end) for sign, end in ((1, proper.lower), (-1, proper.upper))))

    def most(self, values: Tensor) -> Tensor:
        """Return the largest of the ranks' values, entry by entry."""
        return max_over_group(values.contiguous(), self.axis.group)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' values, entry by entry."""
        return self._ranks.sum(values)

    def agree(self, values: Tensor) -> Tensor:
        """Return the first rank's values on all."""
        return self._ranks.agree(values)

    def _gather_numbers(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        return self._ranks.gather(torch.tensor([numbers], dtype=torch.float64, device=device), 0).cpu()


SINGLE_RANK = SearchGroup()


def _places(moves: Sequence[Move]) -> Iterator[tuple[Move, slice]]:
    """Yield each move with the place of its rows among those of all."""
    start = 0
    for move in moves:
        yield move, slice(start, start + move.count)
        start += move.count
