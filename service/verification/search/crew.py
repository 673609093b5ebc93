"""Ranks that search one goal together: each has domains of its own, and once a round they meet.

A meeting is one small all-gather. It tells everybody where all are, so that all end together, and who has nothing
left to do, so that those who have plenty hand over half of it. A crew of one does none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.memory import is_out_of_memory
from service.parallel.mesh import SINGLE, Axis

Counterexample = tuple[float, ...]
AT_MOST = 512
"""Domains that one rank hands over in a meeting."""


@dataclass(frozen=True)
class Standing:
    """Where a rank is, or all are: domains that wait and that were bounded, and the least margin of all there were.

    ``stuck`` says that a domain was given up, ``late`` that the time is over, ``tired`` that the search takes long.
    ``width`` is how many numbers a domain has when it is handed over.
    """

    open: int = 0
    domains: int = 0
    bound: float = inf
    stuck: bool = False
    late: bool = False
    tired: bool = False
    width: int = 0


@dataclass(frozen=True)
class Move:
    """``giver`` hands ``count`` domains to ``taker``."""

    giver: int
    taker: int
    count: int


@dataclass(frozen=True)
class Meeting:
    """What all ranks know after a meeting: the standing of all, a counterexample if any has one, who hands over."""

    all: Standing
    found: Counterexample | None
    moves: tuple[Move, ...] = ()


class Stock(Protocol):
    """A rank's open domains, which can be handed over as rows of numbers."""

    def give(self, count: int, width: int) -> Tensor:
        """Take out ``count`` domains: float64 ``(count, width)``, where ``width`` is at least their own.

        All of them stay where memory runs out.
        """

    def receive(self, rows: Tensor) -> None:
        """Put in what another rank gave."""


@dataclass(frozen=True)
class Crew:
    """The ranks of ``axis``; every one calls the same methods in the same order."""

    axis: Axis = SINGLE

    @property
    def is_first(self) -> bool:
        return self.axis.rank == 0

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.axis)

    def first(self, found: Counterexample | None, device: torch.device) -> Counterexample | None:
        """The counterexample of the lowest rank that has one."""
        if self.axis.size == 1:
            return found
        lengths = self._gathered([0 if found is None else len(found)], device)[:, 0].tolist()
        finder = next((rank for rank, length in enumerate(lengths) if length), None)
        if finder is None:
            return None
        own = torch.zeros(int(lengths[finder]), dtype=torch.float64, device=device)
        if finder == self.axis.rank and found is not None:
            own = torch.tensor(found, dtype=torch.float64, device=device)
        return tuple(self._exchange.sum(own).tolist())

    def anywhere(self, flag: bool, device: torch.device) -> bool:
        """Whether a rank has it set."""
        return bool(self._exchange.largest(int(flag), device))

    def meet(self, own: Standing, found: Counterexample | None, device: torch.device) -> Meeting:
        if self.axis.size == 1:
            return Meeting(own, found)
        each = self._gathered(
            [own.open, own.domains, own.bound, own.stuck, own.late, own.tired, own.width], device
        ).T.tolist()
        opens, domains, bounds, stuck, late, tired, widths = each
        everyone = Standing(
            int(sum(opens)), int(sum(domains)), min(bounds), any(stuck), any(late), any(tired), int(max(widths))
        )
        return Meeting(everyone, self.first(found, device), moves([int(count) for count in opens]))

    def hand_over(self, meeting: Meeting, stock: Stock, device: torch.device) -> list[Tensor]:
        """Carry out the moves of a meeting and return what this rank's stock is to receive.

        Where a rank has no memory for a move, that is what its giver had.
        """
        received = []
        for move in meeting.moves:
            rows, is_giver = None, move.giver == self.axis.rank
            try:
                if is_giver:
                    rows = stock.give(move.count, meeting.all.width).to(device)
                else:
                    rows = torch.zeros(move.count, meeting.all.width, dtype=torch.float64, device=device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            is_short = self.anywhere(rows is None, device)
            if rows is None:
                continue
            if not is_short:
                rows = self._exchange.sum(rows)
            if self.axis.rank == (move.giver if is_short else move.taker):
                received.append(rows)
        return received

    def _gathered(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        return self._exchange.gather(torch.tensor([numbers], dtype=torch.float64, device=device), 0).cpu()


SOLO = Crew()


def moves(opens: Sequence[int]) -> tuple[Move, ...]:
    """Who hands over how much: ranks without domains get half of what the ones with the most have."""
    left = list(opens)
    found = []
    for taker in (rank for rank, count in enumerate(opens) if not count):
        giver = max(range(len(left)), key=lambda rank: left[rank])
        count = min(left[giver] // 2, AT_MOST)
        if not count:
            break
        left[giver] -= count
        left[taker] += count
        found.append(Move(giver, taker, count))
    return tuple(found)
