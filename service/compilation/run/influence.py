"""Finds out which parameters affect no result: a gradient that they lack is no fault."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.compilation.program import Program
from service.compilation.run.baseline import Baseline
from service.compilation.run.built_program import BuiltProgram, build, record_step
from service.compilation.run.oracles import noise_of, scale_of
from service.compilation.run.sampling import Key, local_part

_TRIALS = 16
"""Parameters that are not told apart after so many runs count as affecting losses."""
_MOVED = 0.25
"""The distance by which a parameter is moved, relative to its size."""
_BEYOND = 4.0
"""The multiple of the difference between two eager runs that shows an influence."""


def without_influence(
    program: Program, baseline: Baseline, names: Collection[str], on_any: Callable[[bool], bool]
) -> frozenset[str]:
    """Return those of ``names``, parameters without a gradient in any iteration of training, that affect no
    loss and no gradient of another parameter.

    Each is moved, uncompiled, and nothing must change. Ranks do it together, with the same names; ``on_any`` returns
    whether a condition of this rank holds on any rank.
    """
    search = _InfluenceSearch(build(program, "train"), baseline, on_any)
    return frozenset(names) - search.influential(sorted(names))


@dataclass
class _InfluenceSearch:
    built: BuiltProgram
    baseline: Baseline
    on_any: Callable[[bool], bool]
    trials: int = field(default=0, init=False)

    def influential(self, names: Sequence[str]) -> frozenset[str]:
        """Return the parameters that affect a result, found by bisection."""
        found: set[str] = set()
        pending = [list(names)] if names else []
        while pending:
            group = pending.pop()
            if self.trials < _TRIALS and not self._moves(group):
                continue
            if len(group) == 1 or self.trials >= _TRIALS:
                found.update(group)
                continue
            pending += [group[: len(group) // 2], group[len(group) // 2 :]]
        return frozenset(found)

    def _moves(self, group: Sequence[str]) -> bool:
        """Return whether any result changes with these parameters moved, on any rank."""
        self.trials += 1
        built, eager = self.built.restarted(), self.baseline.eager
        moved = False
        for iteration in range(self.baseline.iterations):
            eager.starts[iteration % len(eager.starts)].restore(built)
            _move({name: built.trainable[name] for name in group if name in built.trainable})
            tensors = record_step(built, iteration).tensors
            moved = moved or any(self._differs(key, iteration, value) for key, value in tensors.items())
        return self.on_any(moved)

    def _differs(self, key: Key, iteration: int, value: Tensor) -> bool:
        oracle = self.baseline.oracles[iteration].get(key)
        if not key[0].startswith(("loss", "gradient")):
            return False
        return oracle is None or noise_of(oracle.eager, value).rms > _BEYOND * oracle.noise.rms


def _move(parameters: dict[str, Tensor]) -> None:
    """Add noise that depends only on the parameter's name."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            own = local_part(parameter)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(own.shape, generator=generator).to(own.device, own.dtype)
            own.add_(_MOVED * (scale_of(own) or 1.0) * noise)
