"""Violations that a single forward pass can show, checked again in float64 before they count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.exchange import Exchange
from service.parallel.tensor import local_copy
from service.verification.properties import Question

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running


@dataclass(frozen=True)
class Outputs:
    """At one input: in float64 by the model itself, and by onnxruntime where it came from ONNX."""

    precise: tuple[float, ...]
    runtime: tuple[float, ...] | None


@dataclass(eq=False)
class Referee:
    """Evaluates inputs on the model itself, not on its graph; all ranks of the group take part.

    A model from ONNX has a ``runtime`` that must agree.
    """

    module: nn.Module
    exchange: Exchange
    runtime: Running | None = None

    @cached_property
    def precise(self) -> nn.Module:
        """The model in float64, made when it is first needed."""
        return local_copy(self.module).double()

    @torch.no_grad()
    def violated(self, question: Question) -> Tensor:
        """Which witnesses violate a row of the question, bool ``(batch,)``; judged in float64."""
        suspects = self._least(self.module, question, _dtype_of(self.module) or question.rows.dtype) < 0
        if not bool(suspects.any()):
            return suspects
        suspects = suspects & (self._least(self.precise, question, torch.float64) < 0)
        return suspects if self.runtime is None else suspects & self._violated_there(self.runtime, question)

    @torch.no_grad()
    def predictions(self, question: Question) -> list[int]:
        """The class that the model gives each witness; all ranks of the group call it."""
        dtype = _dtype_of(self.module) or question.rows.dtype
        found: list[int] = self.exchange.agree(self.module(question.witnesses.to(dtype))).argmax(dim=1).tolist()
        return found

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Outputs:
        """Of one input ``(features,)`` in float64; all ranks of the group call it."""
        found = self.exchange.agree(self.precise(x[None]))[0]
        there = None if self.runtime is None else self.runtime.flat(np.asarray(x.cpu()))
        return Outputs(tuple(found.tolist()), None if there is None else tuple(there.tolist()))

    @staticmethod
    def _violated_there(runtime: Running, question: Question) -> Tensor:
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
