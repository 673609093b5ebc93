"""Divide the seconds of one instance among the stages that decide it: every share is here.

A stage divides its share equally between the layers that it tightens. An instance's part of the time for bounding its
batch is deducted before; a batch may take its instances' time together.

The limit itself is the job's ``budget.seconds``, or that of the instance's archive
(:mod:`service.verification.search_runner`). :func:`service.verification.bab.driver.decide` spends it from the top of
:class:`TimePlan` to the bottom; later stages get the time that one leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TimePlan:
    """The shares of an instance's time. Moments and deadlines are seconds of ``time.monotonic``.

    Rational arithmetic, of small networks, must be over after the share ``exact`` of the limit.

    Attack: all specifications' attacks must be over after the share ``attack`` of the limit; on small networks they
    take much less.

    Choice of the search: where inputs and activations may be split, both have turns. If few inputs vary, a search of
    inputs alone begins with the share ``few_inputs_first`` of the remaining time. Every other turn takes the share
    ``turn`` of the time spent so far, but at least ``least_turn`` seconds, and ``favour`` times as long for the search
    with the best bound so far, for the one whose bound is to prove first at the pace of its last turn, and for one that
    clips its domains.

    Root bounds: an optimising method bounds the whole box if ``optimised_root_cost`` times CROWN's time for it is
    left for it.

    Intermediate bounds: a search over activations that is not over after ``quick_seconds``, or the share
    ``quick_share`` of its time, tightens the bounds that all its domains share, and again ``spacing`` times as long
    after its start, but splits domains for the share ``splitting`` of what that took. The first time optimises
    relaxations and splits nothing, as α-CROWN does, so that a search proves what α-CROWN proves: it may take the share
    ``optimising`` of the time that is left, or ``optimising_in_turns`` beside another search, even if that is longer
    than a turn. A layer may take ``optimised_layer`` times its share of the work, but not if that is too little for a
    few iterations, each of which is assumed to cost ``passes_per_iteration`` passes without a gradient. Later times, by
    branch and bound and by INVPROP, each may take the share ``refining``, and no more than went by until they were due,
    but INVPROP always ``quick_seconds``, and as long as the search has taken for what it is about to prove. Where the
    share ``worthwhile`` of the relaxations was no longer needed, the next time follows at once and is ``lengthening``
    times as long. Several ranks that search together do what one does in ``quick_seconds`` in a part of them, and so is
    everything that follows: see :meth:`divided`.

    Linear programs: a round solves them for ``program_seconds``, whose end other domains wait for.
    """

    exact: float = 0.2
    attack: float = 0.2
    few_inputs_first: float = 0.4
    turn: float = 0.25
    least_turn: float = 0.5
    favour: float = 3.0
    optimised_root_cost: float = 60
    quick_seconds: float = 1.0
    quick_share: float = 0.05
    optimising: float = 0.6
    optimising_in_turns: float = 0.5
    optimised_layer: float = 2.0
    passes_per_iteration: float = 3
    refining: float = 0.5
    worthwhile: float = 0.25
    lengthening: float = 2
    spacing: float = 4
    splitting: float = 0.5
    program_seconds: float = 1.0

    def exact_deadline(self, started: float, limit: float) -> float:
        """Return when rational arithmetic must be over in a decision that has ``limit`` seconds since ``started``."""
        return started + self.exact * limit

    def attack_deadline(self, started: float, limit: float) -> float:
        """Return when the attacks of an instance must be over that has ``limit`` seconds since ``started``."""
        return started + self.attack * limit

    def first_turn(self, left: float, is_few: bool) -> float:
        """Return the seconds of the first search's turn, of ``left`` for all; ``is_few`` says that few inputs vary."""
        return max(self.least_turn, self.few_inputs_first * left) if is_few else self.least_turn

    def next_turn(self, taken: float) -> float:
        """Return the seconds of a turn after searches that have ``taken`` this time together."""
        return max(self.least_turn, self.turn * taken)

    def last_start_of_optimised_root(self, deadline: float, crown_seconds: float) -> float:
        """Return the moment after which a root that CROWN bounded in ``crown_seconds`` is no longer optimised."""
        return deadline - self.optimised_root_cost * crown_seconds

    def divided(self, ranks: int) -> TimePlan:
        """Return the plan of a search by so many ranks, which do in a part of the seconds what one does in all."""
        return replace(self, quick_seconds=self.quick_seconds / ranks, quick_share=self.quick_share / ranks)

    def first_refinement(self, now: float, deadline: float) -> float:
        """Return when a search that starts ``now`` first tightens its intermediate bounds."""
        return now + min(self.quick_seconds, self.quick_share * (deadline - now))

    def refinement_deadline(self, now: float, deadline: float, seconds: float) -> float:
        """Return when branch and bound for intermediate bounds must be over in a search that took ``seconds``."""
        return now + min(seconds, self.refining * (deadline - now))

    def invprop_deadlines(self, now: float, deadline: float, seconds: float, taken: float) -> tuple[float, float]:
        """Return when INVPROP must be over, for all disjuncts, in a search that planned it after ``seconds`` and has
        ``taken`` as long by now: the first where no proof is in sight, the second where one is.
        """
        usual, most = max(seconds, self.quick_seconds), self.refining * (deadline - now)
        return now + min(usual, most), now + min(max(usual, taken), most)

    def optimising_deadline(self, now: float, until: float, deadline: float) -> float:
        """Return when relaxations must be optimised in a search whose turn ends at ``until``."""
        return share_of_rest(now, deadline, self.optimising if until >= deadline else self.optimising_in_turns)

    def layer_deadline(self, now: float, deadline: float, work: float, left: float) -> float:
        """Return when a layer must be optimised whose ``work`` is a part of all that is ``left``."""
        return share_of_rest(now, deadline, min(1.0, self.optimised_layer * work / max(left, 1.0)))

    def is_refinement_worthwhile(self, before: int, after: int) -> bool:
        """Return whether enough relaxations became exact that more refinement is better than splits."""
        return after < (1 - self.worthwhile) * before

    def programs_deadline(self, now: float, deadline: float) -> float:
        """Return when the linear programs of a round must be over."""
        return min(deadline, now + self.program_seconds)


def share_of_rest(now: float, deadline: float, part: float, whole: float = 1.0) -> float:
    """Return when ``part`` of ``whole`` of the time from ``now`` to ``deadline`` is over."""
    return now + (deadline - now) * part / whole
