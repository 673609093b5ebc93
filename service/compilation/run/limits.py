"""Says which wrong results a rung's own way of running explains, and nothing above it shares."""

from __future__ import annotations

from collections.abc import Sequence

from service.compilation.run.parity import Comparison
from service.compilation.run.reference import Reference
from service.compilation.rungs import RUNGS, Rung

_REDRAWN = (
    "Dynamo's backend eager computes a checkpointed block again with other random numbers than its forward drew, "
    "which no backend above it does"
)


def own_limit(rung: Rung, reference: Reference, comparisons: Sequence[Comparison]) -> str:
    """Return the limit of this rung alone by which all that is wrong in ``comparisons`` came about; empty if there is
    none.

    What Dynamo traced is the same on every rung above, which are tried all the same: a fault of the graph shows there.
    """
    wrong = [each for each in comparisons if not each.passed]
    redraws = rung.backend == RUNGS["eager"].backend and reference.eager.random and reference.recomputes
    first = len(reference.eager.records)
    forward = any(each.iteration < first and not each.kind.startswith("gradient") for each in wrong)
    return _REDRAWN if wrong and redraws and not forward else ""
