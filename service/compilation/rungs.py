"""Defines the ladder: a rung for each mode that a spec names, from what compiles least to what compiles most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from service.jobs.spec.compile import MODES, Mode
from service.models.compiled import COMPILE_MODES

Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Rung:
    """One way of compiling, tried only after the previous one passed."""

    name: str
    backend: Backend
    """A job's argument of ``torch.compile``."""
    compiles_backward: bool = True
    """Whether a training step must run a compiled backward graph."""
    generates_code: bool = False
    """Whether it writes kernels, so that its caches and the toolchain matter."""
    decomposes: bool = False
    """Whether operators are made of others, which may draw other random numbers of the same distribution."""
    mode: str | None = None
    """A job's argument of ``torch.compile``."""
    cuda_graphs: bool = False
    """Whether it must capture and replay CUDA graphs; without a CUDA device it is not applicable."""
    rehearses: bool = False
    """Whether it stands in for CUDA graphs on such a device."""

    @property
    def overwrites(self) -> bool:
        return self.cuda_graphs or self.rehearses


def _rung(mode: Mode) -> Rung:
    compile_mode = COMPILE_MODES[mode]
    backend = compile_mode.backend
    return Rung(
        mode,
        backend,
        compiles_backward=backend != "eager",
        generates_code=backend == "inductor",
        decomposes=backend in ("aot_eager_decomp_partition", "inductor"),
        mode=compile_mode.mode,
        cuda_graphs=compile_mode.cuda_graphs,
    )


LADDER: tuple[Rung, ...] = tuple(map(_rung, MODES))
REHEARSAL = Rung("rehearsal", "eager", rehearses=True)
"""A rung with a backend of its own in every run (``instruments.replays``)."""
RUNGS: Mapping[str, Rung] = MappingProxyType({rung.name: rung for rung in LADDER})


def climb_to(modes: tuple[str, ...]) -> tuple[Rung, ...]:
    """Return the rungs named by ``modes``, in ladder order; ``ValueError`` for a name that is on no rung."""
    if unknown := [mode for mode in modes if mode not in RUNGS]:
        raise ValueError(f"modes names {unknown[0]!r}; the rungs are {', '.join(RUNGS)}")
    return tuple(rung for rung in LADDER if rung.name in modes)
