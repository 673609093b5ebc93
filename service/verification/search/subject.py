"""The model under question: a network to bound, a module to attack, and what a counterexample must convince."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from service.bounds.network import Network, prepare
from service.bounds.onnx import load
from service.bounds.onnx.reading import Runtime, parse
from service.verification.search.goal import Goal


@dataclass(frozen=True, eq=False)
class Subject:
    """``module`` and ``network`` are in ``dtype``; ``judge`` is the module in float64, ``runtime`` onnxruntime."""

    module: nn.Module
    network: Network
    judge: nn.Module
    runtime: Runtime
    dtype: torch.dtype

    @classmethod
    def of(cls, data: bytes, dtype: torch.dtype) -> Subject:
        """From an ONNX file's content. Raises ``UnsupportedModelError``."""
        module = load(data).to(dtype)
        return cls(module, prepare(module, (module.features,)), load(data).double(), Runtime.of(parse(data)), dtype)

    @torch.no_grad()
    def convinced(self, goal: Goal, candidates: Tensor) -> tuple[float, ...] | None:
        """The first candidate ``(n, features)`` that violates the property in float64 and in onnxruntime, or none.

        Each is moved into the exact box first.
        """
        exact = torch.minimum(torch.maximum(candidates.double(), goal.lower), goal.upper)
        suspects = goal.per_disjunct(goal.excess(self.judge(exact))).amin(dim=1) <= 0
        for instance in exact[suspects][:8]:
            outputs = torch.from_numpy(self.runtime.flat(np.asarray(instance)))
            if bool((goal.per_disjunct(goal.excess(outputs[None])) <= 0).any()):
                return tuple(float(entry) for entry in instance)
        return None


def worst_first(values: Tensor, count: int) -> Sequence[int]:
    """Indices of the smallest values."""
    return values.topk(min(count, len(values)), largest=False).indices.tolist()
