"""Any module, the same on every tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from service.parallel.tensor.placement import local


class OnEveryRank(nn.Module):
    """Calls ``module`` with this rank's parameters, which are DTensors where the mesh has ``tp`` ranks.

    Inputs and outputs are replicated; the module's ``forward`` must not depend on the rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        own = {name: local(parameter) for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, own, inputs)
