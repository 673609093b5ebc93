"""Decides a query, the cheapest proof first: intervals bound every specification, rational arithmetic may decide a
small network, and what is left is attacked, and then searched by splitting inputs or activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import MemoryShortageError, make_room
from service.bounds.methods import ALPHA_CROWN, CROWN, IBP, IntermediateBounds, Method
from service.bounds.progress import OutOfTimeError
from service.bounds.split import Preactivations
from service.formats.vnnlib import Disjunct, Query
from service.verification.bab.activations.intermediate_bounds import STAGE
from service.verification.bab.activations.search import begin_splitting_activations
from service.verification.bab.attack import attack
from service.verification.bab.decision import (
    Decision,
    SearchProgress,
    SearchResult,
    SearchStrategy,
    SearchTask,
    Technique,
)
from service.verification.bab.inputs.search import begin_splitting_inputs
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Counterexample, Specification, specifications
from service.verification.bab.steps import attack_at_steps
from service.verification.bab.time_plan import share_of_rest
from service.verification.bab.turns import Course, Turns
from service.verification.bab.visited import VisitedInputs
from service.verification.verdict import Verdict

SEARCHES: dict[Technique, SearchStrategy] = {
    Technique.INPUTS: begin_splitting_inputs,
    Technique.ACTIVATIONS: begin_splitting_activations,
}


ExactProof = Callable[[Sequence[Disjunct], float], bool]
"""``(disjuncts, deadline)`` to whether it is proved that nothing satisfies one of them."""


@dataclass(frozen=True)
class DecisionProgress:
    """A moment of a decision; ``seconds`` since it began, the rest as in :class:`SearchProgress`."""

    domains: int
    open: int
    bound: float
    seconds: float


def decide(
    model: ModelUnderVerification,
    query: Query,
    method: Method,
    limit: float,
    progress: Callable[[DecisionProgress], None] = lambda _: None,
    *,
    restarts: int | None = None,
    exactly: ExactProof | None = None,
) -> Decision:
    """Decide the query within about ``limit`` seconds and the model's memory; *unknown* if these do not suffice.

    ``exactly`` may prove what intervals leave open. The attack before the search has ``restarts`` starts, or as many
    as the model's settings say, and at least ``restarts_per_disjunct`` for each disjunct; with 0 there is none. A
    search tries its own inputs all the same. An exception of ``progress`` ends the search. Raises ``ValueError`` for
    a query without disjuncts.
    """
    if not query.disjuncts:
        raise ValueError("query.disjuncts: got none, expected one or more: nothing could be a counterexample")
    started = time.monotonic()
    model = replace(model, visited=VisitedInputs())
    if model.is_alone:  # a rank that stops within a bound would leave those that compute it with it waiting
        model = replace(model, options=model.options.until(started + limit))
    asked = specifications(query, model.device)
    decider = _Decider(model, asked, method, started, limit, progress)
    try:
        decider.specifications = [_with_roundings(model, specification, method) for specification in asked]
        if decider.is_proved_by_intervals() or decider.is_proved(exactly):
            return decider.end(Verdict.VERIFIED, Technique.BOUNDS)
        counterexample = None if restarts == 0 else decider.attack(restarts)
        if counterexample is not None:
            return decider.end(Verdict.FALSIFIED, Technique.ATTACK, counterexample)
        return decider.search()
    except OutOfTimeError:
        return replace(decider.end(Verdict.UNKNOWN, decider.technique), bound=decider.heard)


def _with_roundings(model: ModelUnderVerification, specification: Specification, method: Method) -> Specification:
    """Raise the thresholds to cover coefficients that are rounded, in float64 or in the bounds' type."""
    unbounded = torch.full_like(specification.rows[0], inf)
    if not bool(specification.lost(model.dtype, unbounded).any()):
        return specification
    bounding = method if method.intermediate is IntermediateBounds.INTERVALS else CROWN
    bounds = model.engine.output_bounds(bounding, specification.box(model.dtype), model.options)
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs()).double().nan_to_num(nan=inf)
    return specification.allowing(specification.lost(model.dtype, reach))


def technique_for(specification: Specification, most_inputs: int) -> Technique:
    """Choose what may be split: inputs too, if at most ``most_inputs`` vary in a box, since halving one of many gains
    nothing; otherwise, and over a ball, whose halves are no balls, only activations.
    """
    few = _varying_inputs(specification) <= most_inputs and specification.ball is None
    return Technique.INPUTS if few else Technique.ACTIVATIONS


def _varying_inputs(specification: Specification) -> int:
    return int((specification.upper > specification.lower).sum())


@dataclass(eq=False)
class _Decider:
    """The decision of one query, which adds up over its specifications."""

    model: ModelUnderVerification
    specifications: Sequence[Specification]
    method: Method
    started: float
    limit: float
    progress: Callable[[DecisionProgress], None]
    domains: int = 0
    bounds: list[float] = field(default_factory=list)
    attacking: float = 0.0
    shortage: MemoryShortageError | None = None
    is_hurried: bool = False
    technique: Technique = Technique.ATTACK
    heard: float = -inf
    proved: float = inf
    """The least margin of the disjuncts that are proved already, which are in no specification any more."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_proved_by_intervals(self) -> bool:
        """Bound every specification by intervals, and keep the disjuncts that these leave open; return whether there
        are none. Ranks that search together take the first one's numbers.
        """
        kept = list[Specification]()
        for specification in self.specifications:
            if self._late(self.started + self.limit):
                return False
            margins = self.model.search_group.agree(self._interval_margins(specification))
            open_ = ~(margins > 0)  # NaN proves nothing
            self.proved = min(self.proved, float(margins[~open_].amin()) if not bool(open_.all()) else inf)
            if bool(open_.any()):
                kept.append(specification if bool(open_.all()) else specification.of_disjuncts(open_))
            else:
                self.domains += 1
        self.specifications = kept
        return not kept

    def _interval_margins(self, specification: Specification) -> Tensor:
        try:
            return _margins(self.model, specification, IBP)
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
        make_room(self.model.device)
        return torch.full((specification.disjunct_count,), -inf, device=self.model.device)

    def is_proved(self, exactly: ExactProof | None) -> bool:
        """Return whether rational arithmetic proves all specifications in its share of the time."""
        if exactly is None or any(each.ball is not None for each in self.specifications):
            return False
        disjuncts = [disjunct for each in self.specifications for disjunct in each.exact_disjuncts]
        deadline = self.model.settings.time.exact_deadline(self.started, self.limit)
        found = self.model.search_group.anywhere(exactly(disjuncts, deadline), self.model.device)
        # The proof says that nothing satisfies a disjunct, and not by how much.
        self.proved = min(self.proved, 0.0) if found else self.proved
        if found:
            self.specifications = ()
        return found

    def attack(self, restarts: int | None) -> Counterexample | None:
        """Attack all specifications; each rank of a search group starts from other inputs."""
        search_group = self.model.search_group
        deadline = self.model.settings.time.attack_deadline(self.started, self.limit)
        for number, specification in enumerate(self.specifications):
            if self._late(deadline):
                break
            own = share_of_rest(time.monotonic(), deadline, 1, len(self.specifications) - number)
            counterexample = search_group.first(self._attack(specification, own, restarts), self.model.device)
            self.attacking = self.seconds
            if counterexample is not None:
                return counterexample
        return None

    def _attack(self, specification: Specification, deadline: float, restarts: int | None) -> Counterexample | None:
        """Attack one specification; without enough memory there is no attack, which would prove nothing anyway."""
        try:
            seed = self.model.search_group.axis.rank
            found = attack(self.model, specification, deadline, seed, restarts)
            return found or attack_at_steps(self.model, specification, deadline, seed, restarts)
        except Exception as error:
            if not self.model.engine.survives(error):
                raise
        make_room(self.model.device)
        return None

    def search(self) -> Decision:
        """Search all specifications, one after the other; the first counterexample ends it."""
        verdicts: list[tuple[Verdict, Technique]] = []
        for number, specification in enumerate(self.specifications):
            self.model.splits.specification = number
            if number and self._late(self.started + self.limit):
                verdicts.append((Verdict.UNKNOWN, self.technique))
                break
            result, technique = self._decide(specification)
            self.bounds.append(result.bound)
            if result.verdict is Verdict.FALSIFIED:
                return self.end(Verdict.FALSIFIED, technique, result.counterexample)
            verdicts.append((result.verdict, technique))
        # One specification that is undecided leaves the query undecided.
        undecided = [each for each in verdicts if each[0] is Verdict.UNKNOWN]
        verdict, technique = (undecided or verdicts)[-1]
        return self.end(verdict, technique)

    def _decide(self, specification: Specification) -> tuple[SearchResult, Technique]:
        """Search one specification by each possible kind of splits, in turns."""

        decided = self.domains

        def listen(progress: SearchProgress) -> None:
            least = self._least([*self.bounds, progress.bound])
            self.domains, self.heard = decided + progress.domains, least
            self.progress(DecisionProgress(self.domains, progress.open, least, self.seconds))

        settings, end = self.model.settings, self.started + self.limit
        self.technique = technique_for(specification, settings.inputs.most_inputs)
        varying = _varying_inputs(specification)
        turns = Turns(self._courses(specification), settings.time, end, self._run_guarded, self._late, listen)
        is_few = varying <= settings.few_inputs
        result, technique = turns.run(settings.time.first_turn(end - time.monotonic(), is_few))
        self.domains = decided + result.domains
        self.shortage, self.is_hurried = result.shortage or self.shortage, result.is_hurried or self.is_hurried
        return result, technique

    def _courses(self, specification: Specification) -> list[Course]:
        """Return the searches that may decide a specification. If more than a few inputs vary, half a box is
        hardly easier than the box, so activations are split first.
        """
        settings, splittable = self.model.settings, _has_activations(self.model)
        technique = technique_for(specification, settings.inputs.most_inputs)
        found = [technique]
        if technique is Technique.INPUTS and splittable:
            several = _varying_inputs(specification) > settings.several_inputs
            found = [Technique.ACTIVATIONS, technique] if several else [technique, Technique.ACTIVATIONS]
        return [self._course(each, specification, splittable) for each in found]

    def _course(self, technique: Technique, specification: Specification, splittable: bool) -> Course:
        nothing_to_split = technique is Technique.ACTIVATIONS and not splittable
        begin = _Unsplit if nothing_to_split else SEARCHES[technique]
        return Course(
            technique,
            lambda deadline, listen: begin(SearchTask(self.model, specification, self.method, deadline, listen)),
        )

    def _late(self, deadline: float) -> bool:
        return self.model.search_group.anywhere(self.model.engine.late(deadline), self.model.device)

    def _run_guarded(self, run: Callable[[], SearchResult]) -> SearchResult:
        """Return the result of a turn; without enough memory one that proves nothing and says what was lacking."""
        try:
            return run()
        except Exception as error:
            agreed = isinstance(error, MemoryShortageError) or self.model.search_group.axis.size == 1
            if not agreed or not self.model.engine.survives(error):
                raise
            shortage = self.model.memory.shortage("the search", self.model.device, error)
        make_room(self.model.device)
        return SearchResult(Verdict.UNKNOWN, None, 0, -inf, shortage)

    def _least(self, bounds: Sequence[float]) -> float:
        """Return the least bound over all specifications; nothing is known about later ones yet."""
        return min([*bounds, self.proved]) if len(bounds) == len(self.specifications) else -inf

    def end(self, verdict: Verdict, technique: Technique, counterexample: Counterexample | None = None) -> Decision:
        least = self._least(self.bounds)
        shortage = self.shortage if verdict is Verdict.UNKNOWN else None
        ended = self.domains, self.seconds, least, technique, self.attacking, shortage
        is_hurried = self.is_hurried and verdict is Verdict.UNKNOWN
        return Decision(verdict, counterexample, *ended, self.model.visited.inputs, is_hurried)


def _has_activations(model: ModelUnderVerification) -> bool:
    """Return whether every stage of the model has activations to split; all ranks must ask together."""
    entries = torch.tensor([Preactivations.of(model.network).entries])
    return bool(model.engine.gathered(entries).all())


@dataclass(frozen=True, eq=False)
class _Unsplit:
    """Bounds the whole box, one domain for each disjunct, where a model or stage has no activations to split."""

    task: SearchTask

    @torch.no_grad()
    def run(self, deadline: float) -> SearchResult:
        """Bound the whole box by the method, and by optimisation if CROWN leaves it open."""
        model, method, disjuncts = self.task.model, self.task.method, self.task.specification.disjunct_count
        bound, shortage = -inf, None
        is_crown = method.intermediate is IntermediateBounds.LINEAR and not method.optimises
        for bounding in (method, ALPHA_CROWN) if is_crown else (method,):
            late = model.search_group.anywhere(model.engine.late(deadline), model.device)
            if bound <= 0 and not late:
                try:
                    bound = max(bound, model.together(STAGE, partial(self._least_margin, bounding)))
                except MemoryShortageError as error:
                    shortage = error
        self.task.listener(SearchProgress(disjuncts, 0 if bound > 0 else disjuncts, bound))
        return SearchResult(Verdict.VERIFIED if bound > 0 else Verdict.UNKNOWN, None, disjuncts, bound, shortage)

    def _least_margin(self, method: Method) -> float:
        return float(_margins(self.task.model, self.task.specification, method).min())


@torch.no_grad()
def _margins(model: ModelUnderVerification, specification: Specification, method: Method) -> Tensor:
    """Return the margins of the disjuncts ``(disjuncts,)``, each by the best of its rows."""
    engine, rows = model.engine, specification.rows.to(model.dtype)
    analysis = engine.analyse(method, specification.box(model.dtype), model.options)
    below = engine.lower_bounds(analysis, torch.cat([rows, -rows]))
    inputs = specification.of_inputs(model.dtype)
    least, most = below[: len(rows)], -below[len(rows) :]
    if isinstance(inputs, Interval):
        least, most = least + inputs.lower, most + inputs.upper
    margins = (least - specification.offsets(least, most)).nan_to_num(nan=-torch.inf)
    return specification.per_disjunct(margins[None])[0]
