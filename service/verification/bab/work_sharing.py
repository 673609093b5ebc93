"""Plans which ranks of a search hand subproblems to which: no sockets, no devices.

A rank that has too few for its round would wait for the others, who get their rounds full. It gets as many as an equal
share would be, from those that have the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 0.9
"""The part of a round, or of an equal share if that is less, below which a rank gets subproblems: a round that is
nearly full takes nearly as long as a full one, and handing over costs time.
"""


@dataclass(frozen=True)
class Move:
    """``sender`` hands ``count`` domains to ``receiver``."""

    sender: int
    receiver: int
    count: int


def plan_moves(opens: Sequence[int], rounds: Sequence[int], most: int) -> tuple[Move, ...]:
    """Plan the moves of at most ``most`` domains in all, given how many each rank has, and takes in a round.

    No sender is left with fewer than an equal share, and no receiver gets more than that.
    """
    left, share, moves = list(opens), -(-sum(opens) // len(opens)), list[Move]()
    poorest_first = sorted(range(len(opens)), key=lambda rank: opens[rank])
    for receiver in (rank for rank in poorest_first if opens[rank] < ENOUGH * min(share, rounds[rank])):
        while left[receiver] < share:
            sender = max(range(len(left)), key=lambda rank: left[rank])
            count = min(share - left[receiver], left[sender] - share, most)
            if count <= 0:
                break
            left[sender], left[receiver], most = left[sender] - count, left[receiver] + count, most - count
            moves.append(Move(sender, receiver, count))
    return tuple(moves)
