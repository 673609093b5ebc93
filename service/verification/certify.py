"""Verdicts of instances from one batch of bounds.

:func:`certify` evaluates the witnesses (:mod:`.counterexamples`), bounds a batch by one method and compares the margins
with what rounding may explain. An instance that it leaves unknown may go to a search (:mod:`.search_runner`), whose
bounds allow for rounding by the same two constants.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import Analysis, Bounder, BoundOptions
from service.bounds.network import Network
from service.verification.counterexamples import CounterexampleChecker
from service.verification.progress import PhaseTimes
from service.verification.properties import InstanceBatch

# A property of the dtypes, shared by everything that closes a subproblem in plain arithmetic; see _proved.
RELATIVE_MARGIN = {torch.float32: 2e-5, torch.float64: 1e-10}
ABSOLUTE_MARGIN = {torch.float32: 1e-5, torch.float64: 1e-12}


class Verdict(Enum):
    VERIFIED = "verified"
    FALSIFIED = "falsified"
    UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results of a batch, on every rank of the group alike.

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


@torch.no_grad()
def certify(
    network: Network,
    checker: CounterexampleChecker,
    method: Bounder,
    options: BoundOptions,
    batch: InstanceBatch,
    *,
    clock: PhaseTimes | None = None,
) -> Outcome:
    """Bound the outputs and the property's rows; look at the witnesses first. ``clock`` is told of the phases."""
    start, clock = time.monotonic(), clock or PhaseTimes()
    with clock.phase("witnesses"):
        violated = checker.violated(batch)
    with clock.phase("layers"):
        analysis = method(network, batch.box, options)
    with clock.phase("outputs"):
        output = _output_bounds(analysis, batch.rows.shape[2:], batch.rows)
        margin = torch.full_like(output.lower[:, 0], torch.inf)
        if batch.rows.shape[1]:
            margin = (analysis.lower_bounds(batch.rows) - batch.thresholds).amin(dim=1)
    tp_group = network.tp_group
    output = Interval(tp_group.agree(output.lower), tp_group.agree(output.upper))
    margin = tp_group.agree(margin)
    proved = _proved(margin, output, batch)
    verdicts = tuple(_verdict(bad, good) for bad, good in zip(violated.tolist(), proved.tolist(), strict=True))
    seconds = (time.monotonic() - start) / len(verdicts)
    return Outcome(batch, verdicts, output, margin, dict(analysis.inputs), seconds)


def _output_bounds(analysis: Analysis, shape: Sequence[int], like: Tensor) -> Interval:
    outputs = prod(shape)
    identity = torch.eye(outputs, dtype=like.dtype, device=like.device).reshape(outputs, *shape)
    bounds = analysis.lower_bounds(torch.cat([identity, -identity]).unsqueeze(0))
    return Interval(bounds[:, :outputs], -bounds[:, outputs:])


def _proved(margin: Tensor, output: Interval, batch: InstanceBatch) -> Tensor:
    """Return which margins are positive beyond what rounding may explain.

    Bounds are computed in the model's own floating-point type with rounding to nearest, so a computed lower bound can
    lie above the exact one. Against float64 the error stays below 2e-5 of the bounds' size in float32 on networks of
    practical depth; that much of the largest output bound, times the row's 1-norm, is subtracted. It is an
    estimate, not a proof about rounding. A property without rows proves nothing.
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
