"""Finds out of which parameters without a gradient no loss depends: a head that nobody asks for anything is no fault,
but parameters that are cut off from a loss that they move never train.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.compilation.program import Program
from service.compilation.run.parity import noise_of, scale_of
from service.compilation.run.program_run import ProgramRun, build, record_step
from service.compilation.run.reference import Reference, seed
from service.compilation.run.sampling import Key, local_part

_TRIALS = 16
"""Parameters that are not told apart after so many runs count as those that losses depend on."""
_MOVED = 0.25
"""The distance that a parameter is moved, as a part of its size."""
_BEYOND = 4.0
"""The multiple of what two eager runs differ by that shows an influence."""


def without_influence(
    program: Program, reference: Reference, names: Collection[str], on_any: Callable[[bool], bool]
) -> frozenset[str]:
    """Return those of ``names``, parameters that no iteration of training gave a gradient, of which no loss and no
    gradient of another parameter depends.

    Each is moved, uncompiled, and nothing must change. Ranks do it together, with the same names; ``on_any`` returns
    whether a condition of this rank holds on any rank.
    """
    search = _Halving(build(program, "train"), reference, on_any)
    return frozenset(names) - search.influential(sorted(names))


@dataclass
class _Halving:
    program_run: ProgramRun
    reference: Reference
    on_any: Callable[[bool], bool]
    trials: int = field(default=0, init=False)

    def influential(self, names: Sequence[str]) -> frozenset[str]:
        """Return those that move something, found by halves."""
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
        """Return whether anything is another with these parameters moved, on any rank."""
        self.trials += 1
        program_run, eager = self.program_run.restarted(), self.reference.eager
        moved = False
        for iteration in range(len(eager.records)):
            eager.starts[iteration % len(eager.starts)].restore(program_run)
            _move({name: program_run.trainable[name] for name in group if name in program_run.trainable})
            seed(iteration)
            tensors = record_step(program_run).tensors
            moved = moved or any(self._differs(key, iteration, value) for key, value in tensors.items())
        return self.on_any(moved)

    def _differs(self, key: Key, iteration: int, value: Tensor) -> bool:
        oracle = self.reference.oracles(iteration).get(key)
        if not key[0].startswith(("loss", "gradient")):
            return False
        return oracle is None or noise_of(oracle.eager, value).rms > _BEYOND * oracle.noise.rms


def _move(parameters: dict[str, Tensor]) -> None:
    """Add noise, alike wherever a parameter of this name is."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            own = local_part(parameter)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(own.shape, generator=generator).to(own.device, own.dtype)
            own.add_(_MOVED * (scale_of(own) or 1.0) * noise)
