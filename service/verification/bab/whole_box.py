"""Where activations cannot be split, because a model or one of its stages has none: the whole box is bounded."""

from __future__ import annotations

from functools import partial
from math import inf

import torch

from service.bounds.memory import MemoryShortageError
from service.bounds.methods import ALPHA_CROWN, IntermediateBounds, Method
from service.bounds.split import Preactivations
from service.verification.bab.activations.root_bounds import STAGE
from service.verification.bab.decision import ProgressListener, SearchProgress, SearchResult
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification
from service.verification.certify import Verdict


def has_activations(model: ModelUnderVerification) -> bool:
    """Return whether every stage of the model has some; all ranks must ask together."""
    own = torch.tensor([Preactivations.of(model.network).entries])
    return bool(model.engine.gathered(own).all())


@torch.no_grad()
def bound_whole(
    model: ModelUnderVerification,
    specification: Specification,
    method: Method,
    deadline: float,
    listener: ProgressListener,
) -> SearchResult:
    """A :class:`~service.verification.bab.decision.Search` of one domain for each disjunct."""
    bound, shortage = -inf, None
    is_crown = method.intermediate is IntermediateBounds.LINEAR and not method.optimises
    for bounding in (method, ALPHA_CROWN) if is_crown else (method,):
        late = model.search_group.anywhere(model.engine.late(deadline), model.device)
        if bound <= 0 and not late:
            try:
                bound = max(bound, model.together(STAGE, partial(_least_margin, model, specification, bounding)))
            except MemoryShortageError as error:
                shortage = error
    listener(SearchProgress(specification.disjuncts, 0 if bound > 0 else specification.disjuncts, bound))
    return SearchResult(
        Verdict.VERIFIED if bound > 0 else Verdict.UNKNOWN, None, specification.disjuncts, bound, shortage
    )


def _least_margin(model: ModelUnderVerification, specification: Specification, method: Method) -> float:
    """Over the disjuncts, of the best of their rows."""
    engine, rows = model.engine, specification.rows.to(model.dtype)
    analysis = engine.analyse(method, specification.box(model.dtype), model.effort)
    below = engine.lower_bounds(analysis, torch.cat([rows, -rows]))
    least, most = below[: len(rows)], -below[len(rows) :]
    margins = (least - specification.offsets(least, most)).nan_to_num(nan=-torch.inf)
    return float(specification.per_disjunct(margins[None]).min())
