"""onnxruntime on one rank, for all that bound an instance together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from service.bounds.exchange import Exchange
from service.bounds.stages import Line

if TYPE_CHECKING:
    from service.bounds.onnx.model import Running
    from service.bounds.operators.onnx import Array


@dataclass(eq=False)
class FirstRankRuntime:
    """A model in onnxruntime that only the first rank loads, when it is first run: it takes the whole model.

    ``outputs`` counts the model's; ``dtype`` is its input's. All ranks call it with the same instance.
    """

    load: Callable[[], Running]
    outputs: int
    dtype: type[np.floating[Any]]
    exchange: Exchange
    line: Line | None
    device: torch.device

    def flat(self, instance: Array) -> Array:
        found = torch.zeros(self.outputs, dtype=torch.float64, device=self.device)
        if self.exchange.axis.rank == 0 and (self.line is None or self.line.is_first):
            found = torch.from_numpy(self._session.flat(instance)).to(self.device)
        found = self.exchange.agree(found)
        found = found if self.line is None else self.line.of_first(found)
        return np.asarray(found.cpu())

    @cached_property
    def _session(self) -> Running:
        return self.load()
