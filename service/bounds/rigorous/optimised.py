"""Rigorous bounds through relaxations that an optimiser chose: it is trusted with nothing but the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.linear.propagation import InitialRows
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.operators import NONLINEAR
from service.bounds.operators.allowance import Step
from service.bounds.optimise import Ascending, Ascent, Climber, Families


@dataclass(frozen=True)
class Climbed:
    """Lower bounds ``(batch, rows)`` of a node: α-CROWN's parameters after ``ascent``, or the plain relaxations."""

    ascent: Ascent

    def __call__(self, walk: RigorousPass, start: str, rows: InitialRows) -> Tensor:
        plain = walk.lower_bounds(start, rows)
        # Whole rows: what is chosen for patches would have to be moved to their places.
        whole = rows if isinstance(rows, Tensor) else self._whole(walk, start, rows)
        climber = Climber(Families(walk.plain), start, whole, self.ascent)
        climber.best_bounds(whole)
        with torch.no_grad():
            # The same rows, which ranks share in the same way: each has what was chosen for its own.
            return torch.maximum(plain, through(walk, climber).lower_bounds(start, whole))

    @staticmethod
    def _whole(walk: RigorousPass, start: str, rows: IdentityRows) -> Tensor:
        nodes = walk.network.nodes
        return rows.dense(nodes[start].shape, walk.intervals[walk.network.graph.input.name].lower)


def through(walk: RigorousPass, climber: Ascending) -> RigorousPass:
    """A pass through what was chosen, here and in the stages before."""
    before = walk.network.before
    answer = None if before is None else before.chosen
    return replace(walk, steps={**walk.steps, **_steps(walk, climber)}, before=answer)


def _steps(walk: RigorousPass, climber: Ascending) -> dict[str, Step]:
    """Of the non-linear nodes with parameters, one relaxation for each row."""
    found = {}
    for name, chosen in climber.chosen.items():
        if chosen.parameters:
            node = walk.network.nodes[name]
            inputs = [walk.intervals[each] for each in node.inputs]
            parameters = tuple(each.detach() for each in chosen.parameters)
            member = chosen.family.member(parameters)
            found[name] = NONLINEAR[node.operator].rigorous_step(node, inputs, member, parameters[0].shape[1])
    return found
