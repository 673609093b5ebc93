"""Traces a small network when it is imported. A process's first trace takes several times as long as any later
one, so the process from which ranks are forked makes it once. A torch with CUDA does not: it asks the driver,
and after that a process cannot be forked.
"""

from __future__ import annotations

import contextlib
import importlib

import torch
from torch import Tensor, nn

from service.bounds.capture import capture


class _Small(nn.Module):
    """Calls the operators that most networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        shaped = x.reshape(-1, 1, 2)
        return torch.relu(nn.functional.linear(shaped, 1.0 * self.weight.mT)).softmax(-1).reshape(-1, 2)


def _trace() -> None:
    with contextlib.suppress(ImportError):  # torch draws bars by it, which start a thread
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    capture(_Small(), (2,))


if torch.version.cuda is None:
    _trace()
