"""Where activations cannot be split, because a model or one of its stages has none: the whole box is bounded."""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from service.bounds.memory import MemoryShortageError
from service.bounds.split import Preactivations
from service.verification.bab.activations.root_bounds import STAGE
from service.verification.bab.decision import ProgressListener, SearchProgress, SearchResult
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification
from service.verification.certify import Verdict

TIGHTER = {"crown": "alpha-crown"}


def has_activations(model: ModelUnderVerification) -> bool:
    """In every stage; all ranks must ask together."""
    own = torch.tensor([Preactivations.of(model.network).entries])
    return bool((own if model.staged is None else model.staged.line.joined(own)).all())


@torch.no_grad()
def bound_whole(
    model: ModelUnderVerification,
    specification: Specification,
    method: str,
    deadline: float,
    listener: ProgressListener,
) -> SearchResult:
    """A :class:`~service.verification.bab.decision.Search` of one domain for each disjunct."""
    bound, shortage = -inf, None
    for name in (method, TIGHTER.get(method)):
        late = model.search_group.anywhere(model.late(deadline), model.device)
        if name is not None and bound <= 0 and not late:
            try:
                bound = max(bound, model.together(STAGE, partial(_least_margin, model, specification, name)))
            except MemoryShortageError as error:
                shortage = error
    listener(SearchProgress(specification.disjuncts, 0 if bound > 0 else specification.disjuncts, bound))
    return SearchResult(
        Verdict.VERIFIED if bound > 0 else Verdict.UNKNOWN, None, specification.disjuncts, bound, shortage
    )


def _least_margin(model: ModelUnderVerification, specification: Specification, name: str) -> float:
    """Over the disjuncts, of the best of their rows."""
    network = model.network
    box, rows = specification.box(model.dtype), specification.rows.to(model.dtype)
    both = torch.cat([rows, -rows])
    if model.staged is None:
        box = box.arranged(lambda end: end.reshape(1, *network.graph.input.shape))
        both = both.reshape(-1, *network.graph.output.shape)
    analysis = model.method(name)(network, box, model.effort)
    below: Tensor = network.exchange.agree(analysis.lower_bounds(both[None])[0])
    least, most = below[: len(rows)], -below[len(rows) :]
    margins = (least - specification.offsets(least, most)).nan_to_num(nan=-torch.inf)
    return float(specification.per_disjunct(margins[None]).min())
