"""The ladder: one entry per rung, from the least to the most that is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Rung:
    """One way of compiling, tried only after the one before it passed.

    ``backend`` is what a job would give to ``torch.compile``. ``compiles_backward``: a training step must run a
    compiled backward graph. ``generates_code``: the rung writes kernels, so its caches, the toolchain and its own
    random number generator matter.
    """

    name: str
    backend: Backend
    compiles_backward: bool = True
    generates_code: bool = False


LADDER: tuple[Rung, ...] = (
    Rung("eager", "eager", compiles_backward=False),
    Rung("aot_eager", "aot_eager"),
    Rung("inductor", "inductor", generates_code=True),
)


def climb_to(modes: tuple[str, ...], ladder: tuple[Rung, ...] = LADDER) -> tuple[Rung, ...]:
    """The rungs named by ``modes``, in ladder order; ``ValueError`` for a name that is on no rung."""
    unknown = [mode for mode in modes if mode not in {rung.name for rung in ladder}]
    if unknown:
        raise ValueError(f"modes names {unknown[0]!r}; the rungs are {', '.join(rung.name for rung in ladder)}")
    return tuple(rung for rung in ladder if rung.name in modes)
