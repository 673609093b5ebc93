"""Rigorous bounds through relaxations that an optimiser chose: it is trusted with nothing but the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.linear.propagation import InitialRows
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.operators import NONLINEAR
from service.bounds.optimise import Ascent, Families, RowOptimiser, SlopeOptimiser
from service.bounds.relaxation import RigorousStep


@dataclass(frozen=True)
class OptimisedLowerBounds:
    """Lower bounds ``(batch, rows)`` of a node: α-CROWN's parameters after ``ascent``, or the plain relaxations."""

    ascent: Ascent

    def __call__(self, backward: RigorousPass, start: str, rows: InitialRows) -> Tensor:
        plain = backward.lower_bounds(start, rows)
        # Whole rows: what is chosen for patches would have to be moved to their places.
        whole = rows if isinstance(rows, Tensor) else self._whole(backward, start, rows)
        optimiser = RowOptimiser(Families(backward.plain), start, whole, self.ascent)
        optimiser.best_bounds(whole)
        with torch.no_grad():
            # The same rows, which ranks share in the same way: each has what was chosen for its own.
            return torch.maximum(plain, through(backward, optimiser).lower_bounds(start, whole))

    @staticmethod
    def _whole(backward: RigorousPass, start: str, rows: IdentityRows) -> Tensor:
        nodes = backward.network.nodes
        return rows.dense(nodes[start].shape, backward.intervals[backward.network.graph.input.name].lower)


def through(backward: RigorousPass, optimiser: SlopeOptimiser) -> RigorousPass:
    """Return a pass through what was chosen, here and in the stages before."""
    before = backward.network.before
    answer = None if before is None else before.chosen
    return replace(backward, steps={**backward.steps, **_steps(backward, optimiser)}, before=answer)


def _steps(backward: RigorousPass, optimiser: SlopeOptimiser) -> dict[str, RigorousStep]:
    """Return steps of the non-linear nodes with parameters, one relaxation for each row."""
    found = {}
    for name, chosen in optimiser.chosen.items():
        if chosen.parameters:
            node = backward.network.nodes[name]
            inputs = [backward.intervals[each] for each in node.inputs]
            parameters = tuple(each.detach() for each in chosen.parameters)
            member = chosen.family.member(parameters)
            found[name] = NONLINEAR[node.operator].rigorous_step(node, inputs, member, parameters[0].shape[1])
    return found
