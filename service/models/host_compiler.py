"""Keeps what torch finds out of a host's C++ compiler, and the headers that it prepares, in a folder that outlives the
job: the next one of the same owner begins with them.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from service.torch_internals.table import internal, set_internal

_WORKED = "built and loaded"


@dataclass
class VectorProbes:
    """Answers torch's probes from results kept in ``folder``, for this host, compiler and torch."""

    folder: Path
    assumed: set[Path] = field(default_factory=set, init=False)
    """The files of results that were assumed, not tried."""

    def assume(self) -> None:
        """Let torch choose, and assume that code for this processor's instructions compiles: a kernel will show it."""
        self._choose(assumes=True)

    def keep(self) -> None:
        """Keep the assumed results: a kernel ran."""
        for path in self.assumed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_WORKED)
        self.assumed.clear()

    def forget(self) -> None:
        """Let torch choose anew, and try the assumed results."""
        cpu_vec_isa = internal("torch._inductor.cpu_vec_isa")  # brings Inductor

        self.assumed.clear()
        _clear(cpu_vec_isa)
        for kind in _kinds(cpu_vec_isa.VecISA):
            _clear(kind)
        self._choose(assumes=False)

    def _choose(self, *, assumes: bool) -> None:
        cpp_builder = internal("torch._inductor.cpp_builder")  # brings Inductor
        cpu_vec_isa = internal("torch._inductor.cpu_vec_isa")
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


def own_cache() -> Path | None:
    """Return the folder that outlives this job, for this host and the job's owner; ``None`` outside a job."""
    default = internal("torch._inductor.runtime.cache_dir_utils.default_cache_dir")()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it too, to its default
    return Path(folder) if folder and folder != default else None


def keep_headers(folder: Path) -> None:
    """Keep the C++ compiler's prepared headers in ``folder``, by the names that torch gives them.

    By default they are in the folder for temporary files, which differs for each job; making them takes longer than
    compiling most kernels.
    """
    place = folder / "precompiled_headers"
    set_internal("torch._inductor.codecache._HEADER_DIR", str(place))
    set_internal("torch._inductor.codecache._HEADER_LOCK_DIR", str(place / "locks"))


def reuse_compiler() -> None:
    """Begin with what the owner's earlier jobs kept on this host. Without it, even code that is loaded waits for torch
    to try the processor's instructions and to prepare headers, which takes longer than most kernels.
    """
    if (folder := own_cache()) is not None:
        keep_headers(folder)
        with suppress(RuntimeError):  # without a compiler, torch says so where it needs one
            VectorProbes(folder).forget()
