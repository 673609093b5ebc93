"""Finds counterexamples among the witnesses, and checks them again in float64 before they count.

Candidates of attacks and searches are confirmed by
:meth:`service.verification.bab.model.ModelUnderVerification.first_confirmed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.rank_group import RankGroup
from service.formats.vnnlib import Halfspace
from service.parallel.local_copy import local_copy
from service.verification.properties import InstanceBatch

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running


@dataclass(frozen=True)
class CounterexampleOutputs:
    """The outputs at one input: the model's own in float64, and onnxruntime's for a model from ONNX."""

    precise: tuple[float, ...]
    runtime: tuple[float, ...] | None


@dataclass(eq=False)
class CounterexampleChecker:
    """Evaluates inputs on the model itself, not on its graph; all ranks of the group take part.

    A model from ONNX has a ``runtime`` that must agree. With ``enclosed``, which gives bounds ``(outputs,)`` of the
    outputs over the reals at one input ``(features,)``, float64, all outputs between them must violate the property.
    """

    module: nn.Module
    tp_group: RankGroup
    runtime: Running | None = None
    enclosed: Callable[[Tensor], Interval] | None = None

    @cached_property
    def precise(self) -> nn.Module:
        """Return the model in float64, made when it is first needed."""
        return local_copy(self.module).double()

    @torch.no_grad()
    def violated(self, batch: InstanceBatch) -> Tensor:
        """Return which witnesses violate the property, bool ``(batch,)``: judged in float64, and compared exactly."""
        suspects = self._least(batch) < 0
        if not bool(suspects.any()):
            return suspects
        found = self.tp_group.agree(self.precise(batch.witnesses))
        for index in suspects.nonzero().flatten().tolist():
            suspects[index] = self._is_confirmed(batch.witnesses[index], found[index], batch.violations[index])
        return suspects

    def _is_confirmed(self, witness: Tensor, outputs: Tensor, violations: Sequence[Halfspace]) -> bool:
        if not _is_contained(violations, Interval.point(outputs)):
            return False
        if self.runtime is not None:
            there = torch.from_numpy(self.runtime.flat(np.asarray(witness.cpu())))
            if not _is_contained(violations, Interval.point(there)):
                return False
        return self.enclosed is None or _is_contained(violations, self.enclosed(witness))

    @torch.no_grad()
    def predictions(self, batch: InstanceBatch) -> list[int]:
        """Return the class that the model gives each witness; all ranks of the group call it."""
        dtype = _dtype_of(self.module) or batch.rows.dtype
        found: list[int] = self.tp_group.agree(self.module(batch.witnesses.to(dtype))).argmax(dim=1).tolist()
        return found

    @torch.no_grad()
    def outputs(self, x: Tensor) -> CounterexampleOutputs:
        """Return the outputs at one input ``(features,)`` in float64; all ranks of the group call it."""
        found = self.tp_group.agree(self.precise(x[None]))[0]
        there = None if self.runtime is None else self.runtime.flat(np.asarray(x.cpu()))
        return CounterexampleOutputs(tuple(found.tolist()), None if there is None else tuple(there.tolist()))

    def _least(self, batch: InstanceBatch) -> Tensor:
        """Return the smallest of ``rows · y − thresholds`` at each witness, the same to the last bit on all ranks.

        Computed in the module's type, since it only selects inputs to check again.
        """
        if batch.rows.shape[1] == 0:
            return batch.witnesses.new_full((len(batch.witnesses),), torch.inf)
        dtype = _dtype_of(self.module) or batch.rows.dtype
        output = self.tp_group.agree(self.module(batch.witnesses.to(dtype)))
        values = torch.einsum("brk,bk->br", batch.rows.to(dtype), output) - batch.thresholds.to(dtype)
        return values.amin(dim=1)


def _is_contained(halfspaces: Sequence[Halfspace], outputs: Interval) -> bool:
    lower, upper = outputs.lower.tolist(), outputs.upper.tolist()
    return any(each.contains(lower, upper) for each in halfspaces)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of its parameters, or of its buffers; bounds may be computed in another one."""
    held = (each.dtype for each in (*module.parameters(), *module.buffers()) if each.is_floating_point())
    return next(held, None)
