"""Says when a search over activations tightens the bounds that all its domains share: no clocks, no ranks.

Refinement takes about as long as the search has taken, and the time until the next grows with it. The times are planned
from the first one on, not from the end of the last: what each takes on any number of ranks would put off all that
follow. Where the open domains become fewer, and at that pace will be gone before refinement would be over, the search
goes on instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from service.verification.bab.time_plan import TimePlan


@dataclass(eq=False)
class RefinementTimes:
    """The times of a search that ``started`` at a moment of ``time.monotonic`` and has until ``deadline``."""

    plan: TimePlan
    started: float
    deadline: float
    due: float = field(init=False)
    _planned: float = field(init=False)
    _open: int = field(default=0, init=False)
    _most: int = field(default=0, init=False)
    _most_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.due, self._most_at = self.plan.first_refinement(self.started, self.deadline), self.started
        self._planned = self.due - self.started

    def note(self, open_: int, now: float) -> None:
        """Note how many domains of all ranks are open."""
        self._open = open_
        if open_ >= self._most:
            self._most, self._most_at = open_, now

    def is_due(self, now: float) -> bool:
        """Return whether to refine now."""
        if now <= self.due:
            return False
        fewer = self._most - self._open
        left = self._open * (now - self._most_at) / fewer if fewer > 0 else inf
        if left >= now - self.started:
            return True
        # The forecast is judged by what happens until then.
        self.due, self._most, self._most_at = now + left, self._open, now
        return False

    def end(self, begun: float, now: float) -> None:
        """Note a refinement from ``begun`` to ``now``; the domains that are open now may be others than before."""
        spacing, after = self.plan.spacing, begun - self.started
        self._planned = spacing * (self._planned if after <= spacing / 2 * self._planned else after)
        self.due = max(self.started + self._planned, now + self.plan.splitting * (now - begun))
        self._most, self._most_at = 0, now
