"""Measures whether a program's gradients are those of its own loss: with the same random numbers the loss must change
along a gradient by as much as that says.

A gradient whose dropout drew other numbers than the forward's shows in no distribution of its own, and hardly in how it
goes with outputs; here it does with few seeds. Rounding and curvature move the ratio too, in eager as in compiled code,
so that the two are compared and neither is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from service.compilation.host_fault import raise_host_fault
from service.compilation.run.program_run import ProgramRun
from service.compilation.run.sampling import Key, spread
from service.compilation.run.state import Snapshot
from service.compilation.torch_internals.switches import nothing_compiled

Recorded = Callable[[ProgramRun, Snapshot, int], Mapping[Key, Tensor]]
_STEP = 0.01
"""How far each parameter is moved at most, and the loss by its gradients, as a part of their size."""


def slopes(program_run: ProgramRun, start: Snapshot, seeds: Iterable[int], record: Recorded) -> Tensor | None:
    """Return, in a row for each seed, the change of the first step's loss along its gradients, as a part of the
    predicted one. ``record`` runs a step from a state with a seed. ``None`` if beginning again would compile the
    program again, as with a cache of keys of its own, which takes too long.
    """
    found = []
    try:
        with nothing_compiled():
            for seed in seeds:
                here = record(program_run.restarted(), start, seed)
                moved, said = _along_gradients(program_run, start, here)
                there = record(program_run.restarted(), moved, seed) if said else here
                found.append((_loss(there) - _loss(here)) / said if said else torch.ones((), dtype=torch.float64))
    except Exception as error:
        raise_host_fault(error)
        return None
    return torch.stack(found).nan_to_num().view(-1, 1)


def _along_gradients(program_run: ProgramRun, start: Snapshot, here: Mapping[Key, Tensor]) -> tuple[Snapshot, float]:
    """Return a state some way along the gradients, and by how much they say that the loss changes on it."""
    moves, said = _moves(program_run, start, here)
    part = min(_STEP, _STEP * float(_loss(here).abs()) / said) if said else 0.0
    values = (value + part * moves[number] if number in moves else value for number, value in enumerate(start.values))
    return replace(start, values=tuple(values)), part * said


def _moves(program_run: ProgramRun, start: Snapshot, here: Mapping[Key, Tensor]) -> tuple[dict[int, Tensor], float]:
    """Return, by its place in ``start``, where each parameter goes along its gradient, by as much as it is large; and
    by how much the loss should change. Of a large one those elements move whose gradient is known.
    """
    places = {id(member): number for number, member in enumerate(program_run.members)}
    moves: dict[int, Tensor] = {}
    said = 0.0
    for name, member in program_run.trainable.items():
        gradient, number = here.get(("gradient", name)), places.get(id(member))
        if gradient is None or number is None or not start.values[number].is_floating_point():
            continue
        value, steep = start.values[number], float(gradient.double().norm())
        if steep > 0:
            large = float(value.double().norm())
            moves[number] = spread(gradient.double() * (large / steep), value).to(value.dtype)
            said += large * steep
    return moves, said


def _loss(found: Mapping[Key, Tensor]) -> Tensor:
    losses = [value.double().mean() for (kind, _), value in found.items() if kind == "loss"]
    return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
