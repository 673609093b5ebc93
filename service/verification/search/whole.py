"""Where activations cannot be split, because a model or one of its stages has none: the whole box is bounded."""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from service.bounds.memory import MemoryShortageError
from service.bounds.split import Sites
from service.verification.certify import Verdict
from service.verification.search.decision import Finding, Moment, Watcher
from service.verification.search.goal import Goal
from service.verification.search.root import STAGE
from service.verification.search.subject import Subject

TIGHTER = {"crown": "alpha-crown"}


def has_activations(subject: Subject) -> bool:
    """In every stage; all ranks must ask together."""
    own = torch.tensor([Sites.of(subject.network).entries])
    return bool((own if subject.staged is None else subject.staged.line.joined(own)).all())


@torch.no_grad()
def bound_whole(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """A :class:`~service.verification.search.decision.Search` of one domain for each disjunct."""
    bound, shortage = -inf, None
    for name in (method, TIGHTER.get(method)):
        late = subject.crew.anywhere(subject.late(deadline), subject.device)
        if name is not None and bound <= 0 and not late:
            try:
                bound = max(bound, subject.together(STAGE, partial(_least_margin, subject, goal, name)))
            except MemoryShortageError as error:
                shortage = error
    watcher(Moment(goal.disjuncts, 0 if bound > 0 else goal.disjuncts, bound))
    return Finding(Verdict.VERIFIED if bound > 0 else Verdict.UNKNOWN, None, goal.disjuncts, bound, shortage)


def _least_margin(subject: Subject, goal: Goal, name: str) -> float:
    """Over the disjuncts, of the best of their rows."""
    network = subject.network
    box, rows = goal.box(subject.dtype), goal.rows.to(subject.dtype)
    both = torch.cat([rows, -rows])
    if subject.staged is None:
        box = box.arranged(lambda end: end.reshape(1, *network.graph.input.shape))
        both = both.reshape(-1, *network.graph.output.shape)
    analysis = subject.method(name)(network, box, subject.effort)
    below: Tensor = network.exchange.agree(analysis.lower_bounds(both[None])[0])
    least, most = below[: len(rows)], -below[len(rows) :]
    margins = (least - goal.offsets(least, most)).nan_to_num(nan=-torch.inf)
    return float(goal.per_disjunct(margins[None]).min())
