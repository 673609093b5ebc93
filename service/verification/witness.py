"""Violations that a single forward pass can show, checked again in float64 before they count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.exchange import Exchange
from service.parallel.tensor import local_copy
from service.verification.properties import Question

if TYPE_CHECKING:
    from service.bounds.onnx.reading import Runtime


@dataclass(eq=False)
class Referee:
    """Evaluates inputs on the model itself, not on its graph; all ranks of the group take part.

    A model from ONNX has a ``runtime`` that must agree.
    """

    module: nn.Module
    exchange: Exchange
    runtime: Runtime | None = None
    _precise: nn.Module | None = field(default=None, repr=False)

    @torch.no_grad()
    def violated(self, question: Question) -> Tensor:
        """Which witnesses violate a row of the question, bool ``(batch,)``; judged in float64."""
        suspects = self._least(self.module, question, _dtype_of(self.module) or question.rows.dtype) < 0
        if not bool(suspects.any()):
            return suspects
        if self._precise is None:
            self._precise = local_copy(self.module).double()
        suspects = suspects & (self._least(self._precise, question, torch.float64) < 0)
        return suspects if self.runtime is None else suspects & self._violated_there(self.runtime, question)

    @staticmethod
    def _violated_there(runtime: Runtime, question: Question) -> Tensor:
        inputs = np.asarray(question.witnesses.cpu())
        output = torch.stack([torch.from_numpy(runtime.flat(each)) for each in inputs]).to(question.rows.device)
        values = torch.einsum("brk,bk->br", question.rows.double(), output) - question.thresholds.double()
        return values.amin(dim=1) < 0

    def _least(self, module: nn.Module, question: Question, dtype: torch.dtype) -> Tensor:
        """The smallest of ``rows · y − thresholds`` at each witness, the same to the last bit on all ranks."""
        if question.rows.shape[1] == 0:
            return question.witnesses.new_full((len(question.witnesses),), torch.inf)
        output = self.exchange.agree(module(question.witnesses.to(dtype)))
        values = torch.einsum("brk,bk->br", question.rows.to(dtype), output) - question.thresholds.to(dtype)
        return values.amin(dim=1)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """Of its parameters, or of its buffers where it has none; bounds may be computed in another one."""
    held = (each.dtype for each in (*module.parameters(), *module.buffers()) if each.is_floating_point())
    return next(held, None)
