"""Lets ranks search one specification together: each has its own subproblems, and once per round they synchronise.

That is one small all-gather. It gives every rank the status of all, so that all end together. It also shows
which ranks have no subproblem left, so that ranks with plenty hand over half of theirs. A group of one rank does none
of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.memory import is_out_of_memory
from service.bounds.rank_group import RankGroup
from service.parallel.mesh import SINGLE, Axis
from service.verification.bab.specification import Counterexample


@dataclass(frozen=True)
class SearchStatus:
    """The status of a rank, or of all: subproblems that wait and that were bounded, and the least margin of all.

    ``stuck`` says that a domain was given up, ``late`` that the time is over, ``is_slow`` that the search takes
    long. ``width`` is the number of numbers of a domain in transfer; ``is_over`` says that more time would
    change nothing.
    """

    open: int = 0
    domains: int = 0
    bound: float = inf
    stuck: bool = False
    late: bool = False
    is_slow: bool = False
    width: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Move:
    """``sender`` hands ``count`` domains to ``receiver``."""

    sender: int
    receiver: int
    count: int


@dataclass(frozen=True)
class GroupState:
    """The state that all ranks know after a round: all statuses, a counterexample if there is one, and the moves."""

    all: SearchStatus
    counterexample: Counterexample | None
    moves: tuple[Move, ...] = ()


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
    """The ranks of ``axis``; every one calls the same methods in the same order.

    In a round, one rank hands over at most ``most_moved`` subproblems to another.
    """

    axis: Axis = SINGLE
    most_moved: int = 512

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
        opens, domains, bounds, stuck, late, is_slow, widths, over = self._gather_numbers(numbers, device).T.tolist()
        flags = any(stuck), any(late), any(is_slow), int(max(widths)), any(over)
        everyone = SearchStatus(int(sum(opens)), int(sum(domains)), min(bounds), *flags)
        moves = plan_moves([int(count) for count in opens], self.most_moved)
        return GroupState(everyone, self.first(counterexample, device), moves)

    def rebalance(self, state: GroupState, transfer: WorkTransfer, device: torch.device) -> list[Tensor]:
        """Carry out the planned moves, and return the rows for this rank.

        If a rank has no memory for a move, its rows go back to their sender.
        """
        received = []
        for move in state.moves:
            rows, is_sender = None, move.sender == self.axis.rank
            try:
                if is_sender:
                    rows = transfer.give(move.count, state.all.width).to(device)
                else:
                    rows = torch.zeros(move.count, state.all.width, dtype=torch.float64, device=device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            is_short = self.anywhere(rows is None, device)
            if rows is None:
                continue
            if not is_short:
                rows = self._ranks.sum(rows)
            if self.axis.rank == (move.sender if is_short else move.receiver):
                received.append(rows)
        return received

    def _gather_numbers(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        return self._ranks.gather(torch.tensor([numbers], dtype=torch.float64, device=device), 0).cpu()


SINGLE_RANK = SearchGroup()


def plan_moves(opens: Sequence[int], most: int) -> tuple[Move, ...]:
    """Plan the moves: a rank without domains gets half of another's, and at most ``most``.

    The rank with the most hands over.
    """
    left = list(opens)
    moves = []
    for receiver in (rank for rank, count in enumerate(opens) if not count):
        sender = max(range(len(left)), key=lambda rank: left[rank])
        count = min(left[sender] // 2, most)
        if not count:
            break
        left[sender] -= count
        left[receiver] += count
        moves.append(Move(sender, receiver, count))
    return tuple(moves)
