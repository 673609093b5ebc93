"""Lets searches of one specification take turns; the one that is closer to a proof, and the one that gets there first
at its own pace, have longer turns.

Halving inputs decides most networks with few inputs, and splitting activations decides those with few
activations. Which is better shows only while both run. A change loses nothing, since a search continues where
it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from service.bounds.progress import OutOfTimeError
from service.verification.bab.decision import ProgressListener, Search, SearchProgress, SearchResult, Technique
from service.verification.bab.time_plan import TimePlan
from service.verification.verdict import Verdict

OPEN = SearchResult(Verdict.UNKNOWN, None, 0, -inf, is_over=False)
Run = Callable[[Callable[[], SearchResult]], SearchResult]


@dataclass(eq=False)
class Course:
    """One technique's search: ``begin`` starts it at its first turn, given the last deadline. ``latest`` is its result
    so far, and ``pace`` by how much its bound rose in each second of its last turn; 0 after the first, as it rose from
    nothing.
    """

    technique: Technique
    begin: Callable[[float, ProgressListener], Search]
    search: Search | None = None
    latest: SearchResult = OPEN
    pace: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Return the seconds to a proof if the bound goes on rising like this."""
        return max(-self.latest.bound, 0.0) / self.pace if self.pace > 0 else inf

    def run(self, deadline: float, end: float, listener: ProgressListener) -> SearchResult:
        if self.search is None:
            self.search = self.begin(end, listener)
        return self.search.run(deadline)


@dataclass(eq=False)
class Turns:
    """The searches of one specification, in the order of their first turns.

    ``guarded`` runs a turn and turns a lack of memory into a result; ``late`` returns, equal on all ranks, whether a
    moment has passed.
    """

    courses: Sequence[Course]
    plan: TimePlan
    end: float
    guarded: Run
    late: Callable[[float], bool]
    listener: ProgressListener

    def run(self, first: float) -> tuple[SearchResult, Technique]:
        """Search until the end; the first turn has ``first`` seconds, if there is more than one search."""
        started, course = time.monotonic(), self.courses[0]
        seconds = inf if len(self.courses) == 1 else first
        while not self._turn(course, seconds):
            waiting = [each for each in self.courses if not each.latest.is_over]
            if not waiting or self.late(self.end):
                break
            course, seconds = self._next(waiting, course, time.monotonic() - started)
        return self._result(course), course.technique

    def _next(self, waiting: Sequence[Course], last: Course, taken: float) -> tuple[Course, float]:
        """Return whose turn is next, and its length: each search gets a turn, and the one with the best bound, that is
        to prove first, or that clips its domains, a longer one. A bound that stands says nothing: where boxes are
        halved, it hardly rises until most of them are small.
        """
        course = waiting[(waiting.index(last) + 1) % len(waiting)] if last in waiting else waiting[0]
        if len(waiting) == 1:
            return course, inf
        base = self.plan.next_turn(taken)
        others = [each for each in waiting if each is not course]
        is_best = course.latest.bound > max(each.latest.bound for each in others)
        is_first = course.seconds_left < min(each.seconds_left for each in others)
        # Clipping settles most domains at once and late, so that the bound hardly rises until then.
        is_favoured = is_best or is_first or course.latest.clips
        return course, base * self.plan.favour if is_favoured else base

    def _turn(self, course: Course, seconds: float) -> bool:
        """Give a search its turn; return whether it decided."""
        before, began = course.latest, time.monotonic()
        deadline = min(self.end, began + seconds)
        try:
            found = self.guarded(lambda: course.run(deadline, self.end, self._listening(course)))
        except OutOfTimeError:  # the end of all turns
            return False
        # A turn that runs out of memory reports nothing, and takes nothing back from what was proved before.
        course.latest = replace(found, bound=max(before.bound, found.bound), domains=max(before.domains, found.domains))
        rose = course.latest.bound - before.bound
        course.pace = rose / max(time.monotonic() - began, 1e-9) if isfinite(rose) else 0.0
        return found.verdict is not Verdict.UNKNOWN

    def _listening(self, course: Course) -> ProgressListener:
        def listen(progress: SearchProgress) -> None:
            others = [each.latest for each in self.courses if each is not course]
            domains = progress.domains + sum(each.domains for each in others)
            bound = max(progress.bound, *(each.bound for each in (*others, course.latest)))
            self.listener(SearchProgress(domains, progress.open, bound))

        return listen

    def _result(self, course: Course) -> SearchResult:
        """Return the last search's result, with the domains of all and the best bound."""
        found = [each.latest for each in self.courses]
        shortage = next((each.shortage for each in found if each.shortage is not None), None)
        domains, bound = sum(each.domains for each in found), max(each.bound for each in found)
        # A search that has had no result was still about the bounds of the whole box.
        is_hurried = any(each.is_hurried or (each is OPEN and each is course.latest) for each in found)
        return replace(course.latest, domains=domains, bound=bound, shortage=shortage, is_hurried=is_hurried)
