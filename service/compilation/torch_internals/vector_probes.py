"""Which vector instructions generated code may use: found out once on a host, not by each process that compiles.

Torch 2.11 to 2.13 build a small library for each kind of them and load it in a new process, and have all headers of
vectorized operators compiled for it. A kernel that uses them proves as much.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_WORKED = "built and loaded"


@dataclass
class VectorProbes:
    """Answers torch's probes from what is kept in ``folder``, for this host, compiler and torch."""

    folder: Path
    assumed: set[Path] = field(default_factory=set, init=False)
    """Where those are to be kept that were not tried."""

    def assume(self) -> None:
        """Let torch choose, and take for granted that what this processor has compiles: a kernel is to show that."""
        self._choose(assumes=True)

    def keep(self) -> None:
        """Keep what was assumed: a kernel ran."""
        for path in self.assumed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_WORKED)
        self.assumed.clear()

    def forget(self) -> None:
        """Let torch choose anew, and try what was assumed."""
        from torch._inductor import cpu_vec_isa  # noqa: PLC0415 - brings Inductor

        self.assumed.clear()
        _clear(cpu_vec_isa)
        for kind in _kinds(cpu_vec_isa.VecISA):
            _clear(kind)
        self._choose(assumes=False)

    def _choose(self, *, assumes: bool) -> None:
        from torch._inductor import cpp_builder, cpu_vec_isa  # noqa: PLC0415 - brings Inductor

        kind: Any = cpu_vec_isa.VecISA
        tries: Callable[[Any, str], bool] | None = getattr(kind, "check_build", None)
        if tries is None:
            return
        compiler = cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler())
        about = f"{platform.node()} {torch.__version__} {compiler}"

        def known(isa: Any, code: str) -> bool:
            name = hashlib.sha256(f"{about} {isa.build_arch_flags()} {code}".encode()).hexdigest()[:32]
            path = self.folder / "probes" / name
            if path.exists():
                return True
            if assumes:
                self.assumed.add(path)
                return True
            works = tries(isa, code)
            if works:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_WORKED)
            return works

        kind.check_build = known
        try:
            cpu_vec_isa.pick_vec_isa()
        finally:
            kind.check_build = tries


def _kinds(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(each for one in below for each in _kinds(one))]


def _clear(holder: Any) -> None:
    """Clear the results that functions of a module or class remember."""
    for member in vars(holder).values():
        if callable(clear := getattr(member, "cache_clear", None)):
            clear()
