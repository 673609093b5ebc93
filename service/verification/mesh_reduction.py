"""Reductions over all ranks of a mesh; every rank calls, and goes on when all have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.parallel.collectives import max_over_group, reduce_from_group
from service.parallel.mesh import Mesh


@dataclass(frozen=True)
class MeshReduction:
    mesh: Mesh
    device: torch.device

    def mean(self, values: Tensor) -> list[float]:
        total = values.to(self.device)
        for axis in (self.mesh.tp, self.mesh.dp, self.mesh.pp):
            total = reduce_from_group(total, axis.group) / axis.size
        found: list[float] = total.tolist()
        return found

    def most(self, value: float) -> float:
        most = torch.tensor([value], dtype=torch.float64, device=self.device)
        for axis in (self.mesh.tp, self.mesh.dp, self.mesh.pp):
            most = max_over_group(most, axis.group)
        return float(most)
