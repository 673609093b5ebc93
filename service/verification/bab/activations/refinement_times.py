"""Says when a search over activations tightens the bounds that all its domains share: no clocks, no ranks.

Refinement takes about as long as the search has taken, and the time until the next grows with it. The times are planned
from the first one on, not from the end of the last: what each takes on any number of ranks would put off all that
follow. Where the open domains become fewer, and at that pace will be gone before refinement would be over, the search
goes on instead. Rounds of INVPROP gain more the closer they are to a proof, so their pace decides how long they go on.
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
    _most: tuple[int, float] = field(default=(0, 0.0), init=False)
    _over_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.due = self.plan.first_refinement(self.started, self.deadline)
        self._planned = self.due - self.started

    def end(self, begun: float, now: float) -> None:
        """Note a refinement from ``begun`` to ``now``, after which other domains may be open."""
        spacing, after = self.plan.spacing, begun - self.started
        self._planned = spacing * (self._planned if after <= spacing / 2 * self._planned else after)
        self.due = max(self.started + self._planned, now + self.plan.splitting * (now - begun))
        self._most, self._over_at = (0, 0.0), 0.0

    def note(self, open_: int, seconds: float) -> None:
        """Note how many domains are open after ``seconds`` of the search: equal numbers on all of its ranks."""
        if open_ >= self._most[0]:
            self._most = open_, seconds

    def is_about_to_end(self, open_: int, seconds: float) -> bool:
        """Return whether the search will be over before refinement would be, so far as was noted."""
        if seconds < self._over_at:
            return True
        most, at = self._most
        left = open_ * (seconds - at) / (most - open_) if open_ < most else inf
        if left >= seconds:
            return False
        # What happens until then is judged by itself: domains that become fewer no more must not put it off for ever.
        self._most, self._over_at = (open_, seconds), seconds + left
        return True


@dataclass(frozen=True)
class MarginPace:
    """The ``margin`` of a whole box after a round that tightened its bounds, which took ``seconds``, and the one
    ``before`` it: negative numbers while nothing is proved.
    """

    margin: float
    before: float = -inf
    seconds: float = 0.0

    def has_gained(self, share: float) -> bool:
        """Return whether the round brought this share of the margin that was lacking."""
        return self.before * (1 - share) < self.margin

    @property
    def seconds_to_proof(self) -> float:
        """How long it takes to a proof if all rounds gain as much as the last one; ``inf`` without a gain."""
        gain = self.margin - self.before
        return -self.margin * self.seconds / gain if 0 < gain < inf else inf
