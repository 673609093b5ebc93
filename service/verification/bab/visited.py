"""Keeps the inputs at which a decision came nearest to a counterexample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.verification.bab.specification import CPU, Specification

MOST_VISITED = 64


@dataclass(eq=False)
class VisitedInputs:
    """Holds at most :data:`MOST_VISITED` ``inputs`` ``(n, features)``, float64 on the host, the nearest first."""

    inputs: Tensor | None = None
    distances: Tensor | None = None

    @torch.no_grad()
    def add(self, specification: Specification, x: Tensor, distances: Tensor) -> None:
        """Note inputs ``(n, features)``, moved into the exact set, at these ``distances`` ``(n,)`` from a disjunct."""
        if not len(distances):
            return
        is_full = self.distances is not None and len(self.distances) == MOST_VISITED
        if self.distances is not None and is_full and bool(distances.amin() >= self.distances[-1]):
            return
        nearest = distances.nan_to_num(nan=torch.inf).topk(min(MOST_VISITED, len(distances)), largest=False).indices
        found = specification.nearest(x[nearest].double()).to(CPU)
        at = distances[nearest].nan_to_num(nan=torch.inf).to(CPU, torch.float64)
        if self.inputs is not None and self.distances is not None:
            found, at = torch.cat([self.inputs, found]), torch.cat([self.distances, at])
        order = at.argsort(stable=True)[:MOST_VISITED]
        self.inputs, self.distances = found[order], at[order]
