"""Bounds the whole box of a search over activations."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import MemoryShortageError
from service.bounds.methods import CROWN, Analysis, IntermediateBounds, Method
from service.bounds.rank_group import RankGroup
from service.bounds.split import Preactivations
from service.verification.bab.activations.dual_objective import DisjunctRows
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification

STAGE = "the bounds of the whole box"


@dataclass(frozen=True, eq=False)
class RootBounds:
    """The whole box: bounds ``(1, entries)`` of all preactivations, and margins ``(disjuncts, rows)`` of the rows."""

    box: Interval
    bounds: Interval
    specification_rows: DisjunctRows
    margins: Tensor
    analysis: Analysis


@torch.no_grad()
def bound_root(
    model: ModelUnderVerification, specification: Specification, method: Method, deadline: float
) -> RootBounds:
    """Bound the whole box by CROWN, and by an optimising method where there is reason and time for it."""
    engine, box = model.engine, model.together(STAGE, lambda: specification.box(model.dtype))
    started = time.monotonic()
    first = CROWN if method.intermediate is IntermediateBounds.OPTIMISED else method

    def analysed(method: Method) -> tuple[Analysis, DisjunctRows, Tensor]:
        analysis = engine.analyse(method, box, model.options)
        return analysis, *_asked(model, specification, analysis)

    analysis, specification_rows, margins = model.together(STAGE, lambda: analysed(first))
    crown_seconds = time.monotonic() - started
    late = model.engine.late(model.settings.time.last_start_of_optimised_root(deadline, crown_seconds))
    enough = late or engine.refines or bool((margins.amax(dim=1) > 0).all())
    if first != method and not model.search_group.anywhere(enough, model.device):
        with suppress(MemoryShortageError):  # what is known is known
            analysis, specification_rows, margins = model.together(STAGE, lambda: analysed(method))
    # Domains that ranks exchange have parameters for the entries that are open here, the same on all of them.
    search_group = RankGroup(model.search_group.axis)
    bounds = Preactivations.of(engine.network).bounds(analysis.inputs)
    return RootBounds(
        engine.entering(analysis, box),
        Interval(search_group.agree(bounds.lower), search_group.agree(bounds.upper)),
        specification_rows,
        margins,
        analysis,
    )


def _asked(
    model: ModelUnderVerification, specification: Specification, analysis: Analysis
) -> tuple[DisjunctRows, Tensor]:
    """Return the rows by disjunct, and the margins that the root's bounds prove of each."""
    network, dtype = model.network, model.dtype
    rows = specification.rows.to(dtype)
    below = model.engine.lower_bounds(analysis, torch.cat([rows, -rows]))
    least, most = below[: len(rows)], -below[len(rows) :]
    inputs, offsets = specification.of_inputs(dtype), specification.offsets(least, most)
    if isinstance(inputs, Interval):
        offsets = specification.offsets(least + inputs.lower, most + inputs.upper) - inputs.lower
    place = torch.stack(
        [(specification.disjunct[:index] == own).sum() for index, own in enumerate(specification.disjunct)]
    )
    shape = specification.disjunct_count, int(place.max()) + 1
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
