"""The whole box of a search over activations: its bounds, and what they prove."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.interval import Interval
from service.bounds.memory import MemoryShortageError
from service.bounds.methods import Analysis
from service.bounds.split import Sites
from service.bounds.stages import StagedAnalysis
from service.verification.search.goal import Goal
from service.verification.search.subject import Subject
from service.verification.search.walk import Question

CHEAPER = {"alpha-crown": "crown"}
STAGE = "the bounds of the whole box"
COST = 60
"""How many times the cheaper method's time the other may take."""


@dataclass(frozen=True, eq=False)
class Root:
    """The whole box: bounds ``(1, entries)`` of all sites, and margins ``(disjuncts, rows)`` of the question."""

    box: Interval
    bounds: Interval
    question: Question
    margins: Tensor
    analysis: Analysis


@torch.no_grad()
def bounded(subject: Subject, goal: Goal, method: str, deadline: float) -> Root:
    """CROWN's, and what an optimising method adds where there is reason and time, and no search that does the same."""
    network, box = subject.network, subject.together(STAGE, lambda: goal.box(subject.dtype))
    if subject.staged is None:
        box = box.arranged(lambda end: end.reshape(1, *network.graph.input.shape))
    started = time.monotonic()
    first = CHEAPER.get(method, method)

    def analysed(name: str) -> tuple[Analysis, Question, Tensor]:
        analysis = subject.method(name)(network, box, subject.effort)
        return analysis, *_asked(subject, goal, analysis)

    analysis, question, margins = subject.together(STAGE, lambda: analysed(first))
    late = subject.late(deadline - COST * (time.monotonic() - started))
    enough = late or _optimises_later(subject) or bool((margins.amax(dim=1) > 0).all())
    if first != method and not subject.crew.anywhere(enough, subject.device):
        with suppress(MemoryShortageError):  # what is known is known
            analysis, question, margins = subject.together(STAGE, lambda: analysed(method))
    # Domains that are handed over have parameters for the entries that are open here, on all ranks the same.
    crew = Exchange(subject.crew.axis)
    bounds = Sites.of(network).bounds(analysis.inputs)
    box = analysis.entering if isinstance(analysis, StagedAnalysis) else box
    return Root(box, Interval(crew.agree(bounds.lower), crew.agree(bounds.upper)), question, margins, analysis)


def _optimises_later(subject: Subject) -> bool:
    """Within the search's time, and only when splits do not decide soon."""
    return subject.network.exchange.axis.size == 1 and subject.staged is None and not subject.rigorous


def _asked(subject: Subject, goal: Goal, analysis: Analysis) -> tuple[Question, Tensor]:
    """Rows by disjunct, and what the root's bounds prove of each."""
    network, dtype = subject.network, subject.dtype
    rows = goal.rows.to(dtype)
    both = torch.cat([rows, -rows])
    if subject.staged is None:
        both = both.reshape(-1, *network.graph.output.shape)
    below = network.exchange.agree(analysis.lower_bounds(both[None])[0])
    least, most = below[: len(rows)], -below[len(rows) :]
    offsets = goal.offsets(least, most)
    place = torch.stack([(goal.disjunct[:index] == own).sum() for index, own in enumerate(goal.disjunct)])
    shape = goal.disjuncts, int(place.max()) + 1
    used = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    used[goal.disjunct, place] = True
    question = Question(network.graph.output.name, rows.new_zeros(*shape, rows.shape[1]), rows.new_zeros(shape), used)
    question.rows[goal.disjunct, place], question.offsets[goal.disjunct, place] = rows, offsets
    margins = rows.new_full(shape, -torch.inf)
    margins[goal.disjunct, place] = least - offsets
    return question, margins.nan_to_num(nan=-torch.inf)
