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
from service.bounds.split import Preactivations
from service.bounds.stages import StagedAnalysis
from service.verification.bab.activations.dual_objective import DisjunctRows
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification

CHEAPER = {"alpha-crown": "crown"}
STAGE = "the bounds of the whole box"
COST = 60
"""How many times the cheaper method's time the other may take."""


@dataclass(frozen=True, eq=False)
class RootBounds:
    """The whole box: bounds ``(1, entries)`` of all preactivations, and margins ``(disjuncts, rows)`` of the rows."""

    box: Interval
    bounds: Interval
    specification_rows: DisjunctRows
    margins: Tensor
    analysis: Analysis


@torch.no_grad()
def bound_root(model: ModelUnderVerification, specification: Specification, method: str, deadline: float) -> RootBounds:
    """Bound the whole box by CROWN, and by an optimising method where there is reason and time for it."""
    network, box = model.network, model.together(STAGE, lambda: specification.box(model.dtype))
    if model.staged is None:
        box = box.arranged(lambda end: end.reshape(1, *network.graph.input.shape))
    started = time.monotonic()
    first = CHEAPER.get(method, method)

    def analysed(name: str) -> tuple[Analysis, DisjunctRows, Tensor]:
        analysis = model.method(name)(network, box, model.effort)
        return analysis, *_asked(model, specification, analysis)

    analysis, specification_rows, margins = model.together(STAGE, lambda: analysed(first))
    late = model.late(deadline - COST * (time.monotonic() - started))
    enough = late or _optimises_later(model) or bool((margins.amax(dim=1) > 0).all())
    if first != method and not model.search_group.anywhere(enough, model.device):
        with suppress(MemoryShortageError):  # what is known is known
            analysis, specification_rows, margins = model.together(STAGE, lambda: analysed(method))
    # Domains that are handed over have parameters for the entries that are open here, on all ranks the same.
    search_group = Exchange(model.search_group.axis)
    bounds = Preactivations.of(network).bounds(analysis.inputs)
    box = analysis.entering if isinstance(analysis, StagedAnalysis) else box
    return RootBounds(
        box,
        Interval(search_group.agree(bounds.lower), search_group.agree(bounds.upper)),
        specification_rows,
        margins,
        analysis,
    )


def _optimises_later(model: ModelUnderVerification) -> bool:
    """Within the search's time, and only when splits do not decide soon."""
    return model.network.exchange.axis.size == 1 and model.staged is None and not model.rigorous


def _asked(
    model: ModelUnderVerification, specification: Specification, analysis: Analysis
) -> tuple[DisjunctRows, Tensor]:
    """Return the rows by disjunct, and what the root's bounds prove of each."""
    network, dtype = model.network, model.dtype
    rows = specification.rows.to(dtype)
    both = torch.cat([rows, -rows])
    if model.staged is None:
        both = both.reshape(-1, *network.graph.output.shape)
    below = network.exchange.agree(analysis.lower_bounds(both[None])[0])
    least, most = below[: len(rows)], -below[len(rows) :]
    offsets = specification.offsets(least, most)
    place = torch.stack(
        [(specification.disjunct[:index] == own).sum() for index, own in enumerate(specification.disjunct)]
    )
    shape = specification.disjuncts, int(place.max()) + 1
    used = torch.zeros(shape, dtype=torch.bool, device=rows.device)
    used[specification.disjunct, place] = True
    specification_rows = DisjunctRows(
        network.graph.output.name, rows.new_zeros(*shape, rows.shape[1]), rows.new_zeros(shape), used
    )
    (
        specification_rows.rows[specification.disjunct, place],
        specification_rows.offsets[specification.disjunct, place],
    ) = rows, offsets
    margins = rows.new_full(shape, -torch.inf)
    margins[specification.disjunct, place] = least - offsets
    return specification_rows, margins.nan_to_num(nan=-torch.inf)
