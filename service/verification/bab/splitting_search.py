"""Keeps what a search by splitting keeps on one rank, whatever it splits, and lets it outlive a shortage of memory."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeVar

from service.bounds.memory import MemoryShortageError, make_room
from service.verification.bab.decision import ProgressListener, SearchProgress
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.search_group import SearchStatus

T = TypeVar("T")


class SplittingSearch:
    """The bookkeeping of a search.

    ``least_proved`` is the least margin of what is proved, and ``least_stuck`` of what was given up; ``is_over`` says
    that memory ended the search. ``in_transit`` counts domains on their way from one rank to another.
    """

    model: ModelUnderVerification
    listener: ProgressListener
    domains, in_transit, bound = 0, 0, -inf
    least_proved, least_stuck = inf, inf
    shortage: MemoryShortageError | None = None
    is_over = False

    def _make_room(self) -> None:
        """Free memory that only makes the next step faster."""
        make_room(self.model.device)

    def _end_short(self, phase: str, error: Exception) -> None:
        """End the search for want of memory; called while the error is handled."""
        self.shortage, self.is_over = self.model.memory.shortage(phase, self.model.device, error), True

    def _if_memory_allows(self, run: Callable[[], T], losing: str | None = None) -> T | None:
        """Return the result of ``run``, or ``None`` if memory runs out.

        If that loses domains, nothing is proved of them: the search ends undecided, in the phase ``losing``.
        """
        try:
            return run()
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
            if losing is not None:
                self._end_short(losing, error)
                self.least_stuck = -inf
        # Not in the handler, where the error's traceback still holds the failed step's tensors.
        self._make_room()
        return None

    def _report(self, everyone: SearchStatus) -> None:
        self.bound = max(self.bound, everyone.bound)
        self.listener(SearchProgress(everyone.domains, everyone.open, self.bound))
