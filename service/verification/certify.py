"""Decides verdicts of instances from one batch of bounds.

:func:`certify` evaluates the witnesses (:mod:`.counterexamples`), bounds a batch by one method and compares the margins
with the allowance for rounding (:mod:`.verdict`). An instance that stays unknown may go to a search
(:mod:`.search_runner`), which allows for rounding by the same two constants.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import Analysis, Bounder, BoundOptions
from service.verification.counterexamples import CounterexampleChecker
from service.verification.engine.base import BoundingEngine
from service.verification.progress import PhaseTimes
from service.verification.properties import InstanceBatch
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN, Verdict


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results of a batch, the same on every rank of the group.

    ``output`` bounds are ``(batch, outputs)``; ``margin`` ``(batch,)`` is the least lower bound over the rows, +inf
    without rows; ``inputs`` are the bounds of each non-linear node's input, this rank's entries where divided.
    ``seconds`` is the time per instance.
    """

    batch: InstanceBatch
    verdicts: tuple[Verdict, ...]
    output: Interval
    margin: Tensor
    inputs: dict[str, tuple[Interval, ...]]
    seconds: float

    @property
    def overflows(self) -> list[bool]:
        """Return of each instance whether the bounds of a non-linear node's input are infinite, on this rank."""
        flags = [end.reshape(len(end), -1).isinf().any(dim=1) for each in self.inputs.values() for end in _ends(each)]
        return torch.stack(flags).any(dim=0).tolist() if flags else [False] * len(self.verdicts)


@torch.no_grad()
def certify(
    engine: BoundingEngine,
    checker: CounterexampleChecker,
    method: Bounder,
    options: BoundOptions,
    batch: InstanceBatch,
    *,
    clock: PhaseTimes | None = None,
) -> Outcome:
    """Evaluate the witnesses, then bound the outputs and the property's rows by ``method``, a bounder of the engine.

    ``clock`` records the phases.
    """
    start, clock = time.monotonic(), clock or PhaseTimes()
    with clock.phase("witnesses"):
        violated = checker.violated(batch)
    with clock.phase("layers"):
        analysis = method(engine.network, batch.box, options)
    with clock.phase("outputs"):
        output = _output_bounds(analysis, batch.rows.shape[2:], batch.rows)
        margin = torch.full_like(output.lower[:, 0], torch.inf)
        if batch.rows.shape[1]:
            margin = (analysis.lower_bounds(batch.rows) - batch.thresholds).amin(dim=1)
    tp_group = engine.network.tp_group
    output = _uncross(Interval(tp_group.agree(output.lower), tp_group.agree(output.upper)))
    margin = tp_group.agree(margin)
    proved = _proved_margins(margin, output, batch)
    verdicts = tuple(_verdict(bad, good) for bad, good in zip(violated.tolist(), proved.tolist(), strict=True))
    seconds = (time.monotonic() - start) / len(verdicts)
    return Outcome(batch, verdicts, output, margin, dict(analysis.inputs), seconds)


def _ends(bounds: Sequence[Interval]) -> Iterator[Tensor]:
    for each in bounds:
        yield from (each.lower, each.upper)


def _output_bounds(analysis: Analysis, shape: Sequence[int], like: Tensor) -> Interval:
    outputs = prod(shape)
    identity = torch.eye(outputs, dtype=like.dtype, device=like.device).reshape(outputs, *shape)
    bounds = analysis.lower_bounds(torch.cat([identity, -identity]).unsqueeze(0))
    return Interval(bounds[:, :outputs], -bounds[:, outputs:])


def _uncross(output: Interval) -> Interval:
    """Return the bounds; where rounding made their ends cross, widen them by the amount of the crossing."""
    missing = (output.lower - output.upper).clamp(min=0)
    lower, upper = torch.minimum(output.lower, output.upper), torch.maximum(output.lower, output.upper)
    return Interval(lower - missing, upper + missing)


def _proved_margins(margin: Tensor, output: Interval, batch: InstanceBatch) -> Tensor:
    """Return which margins are positive beyond the allowance for rounding.

    The relative margin is a part of the largest output bound, times the row's 1-norm. A property without rows proves
    nothing.
    """
    if batch.rows.shape[1] == 0:
        return torch.zeros_like(margin, dtype=torch.bool)
    dtype = margin.dtype
    size = torch.maximum(output.lower.abs(), output.upper.abs()).amax(dim=1)
    reach = size * batch.rows.abs().sum(dim=2).amax(dim=1) + batch.thresholds.abs().amax(dim=1)
    return margin > ABSOLUTE_MARGIN[dtype] + RELATIVE_MARGIN[dtype] * reach


def _verdict(violated: bool, proved: bool) -> Verdict:
    if violated:
        return Verdict.FALSIFIED
    return Verdict.VERIFIED if proved else Verdict.UNKNOWN
