"""Defines the ladder: one entry per rung, from the one that compiles least to the one that compiles most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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


def _rung(name: str, *, compiles_backward: bool = True, generates_code: bool = False, decomposes: bool = False) -> Rung:
    compile_mode = COMPILE_MODES[name]
    return Rung(
        name,
        compile_mode.backend,
        compiles_backward,
        generates_code,
        decomposes or generates_code,
        compile_mode.mode,
        compile_mode.cuda_graphs,
    )


LADDER: tuple[Rung, ...] = (
    _rung("eager", compiles_backward=False),
    _rung("aot_eager"),
    _rung("aot_eager_decomp_partition", decomposes=True),
    _rung("inductor", generates_code=True),
    _rung("reduce-overhead", generates_code=True),
)
REHEARSAL = Rung("rehearsal", "eager", rehearses=True)
"""A rung with a backend of its own in every run (``instruments.replays``)."""
RUNGS: Mapping[str, Rung] = MappingProxyType({rung.name: rung for rung in LADDER})


def climb_to(modes: tuple[str, ...]) -> tuple[Rung, ...]:
    """Return the rungs named by ``modes``, in ladder order; ``ValueError`` for a name that is on no rung."""
    if unknown := [mode for mode in modes if mode not in RUNGS]:
        raise ValueError(f"modes names {unknown[0]!r}; the rungs are {', '.join(RUNGS)}")
    return tuple(rung for rung in LADDER if rung.name in modes)
