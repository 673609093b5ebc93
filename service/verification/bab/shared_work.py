"""Divides work whose results all ranks of a search need, such as bounds of hidden values: each rank does its part, and
all take the best of what any of them found.

No rank may leave such work alone, or the others would wait for it: one that lacks memory, or time, contributes what was
known before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import make_room
from service.verification.bab.search_group import SINGLE_RANK, SearchGroup

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SharedWork:
    """The part of this rank of ``group``; ``survives`` says after which errors it goes on without its own result."""

    group: SearchGroup = SINGLE_RANK
    device: torch.device = CPU
    survives: Callable[[Exception], bool] = lambda _: False

    @property
    def is_divided(self) -> bool:
        return self.group.axis.size > 1

    def own(self, entries: Tensor) -> Tensor:
        """Return this rank's part of entries, of which every rank passes the same."""
        return self.group.own(entries)

    def late(self, deadline: float) -> bool:
        """Return whether ``deadline`` (``time.monotonic``) has passed on any rank."""
        return self.group.anywhere(time.monotonic() > deadline, self.device)

    def tightest(self, bound: Callable[[], Interval], known: Interval) -> Interval:
        """Return the best ends that ``bound`` returns on any rank, in which none waits for another; ends may cross.

        Where memory runs out, the bounds stay as they are ``known``.
        """
        found = None
        try:
            found = bound()
        except Exception as error:
            if not self.survives(error):
                raise
        if found is None:  # not in the handler, where the error's traceback still holds the failed step's tensors
            make_room(self.device)
        return self.group.tightest(known if found is None else found)
