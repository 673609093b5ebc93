"""Pays the costs of a process's first generated kernel in advance: it finds compilers and precompiles headers.

The results are kept in a folder of the host that outlives the job, for the next one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch

from service.compilation.instruments.caches import empty_caches, forget_compiled
from service.torch_internals.table import internal, internal_if_there, set_internal

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


log = logging.getLogger(__name__)
_PREPARES = "torch._inductor.codecache._precompile_header"
_EMPTY = 'extern "C" void kernel(float* out) {}'


def own_cache() -> Path | None:
    """Return the folder that outlives this job, for this host and the job's owner; ``None`` outside a job."""
    default = internal("torch._inductor.runtime.cache_dir_utils.default_cache_dir")()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it too, to its default
    return Path(folder) if folder and folder != default else None


@dataclass
class Toolchain:
    """Starts code generation for ``device`` once, partly in a thread beside other work of the process."""

    device: torch.device
    cache: Path | None = field(default_factory=own_cache)
    _probes: VectorProbes | None = field(default=None, init=False)
    _preparing: Thread | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.cache is not None:
            _keep_headers(self.cache)
        if self.device.type == "cpu":  # torch would start processes that compile for GPUs, even without using any
            os.environ.setdefault("TORCH_WARM_POOL", "0")

    def begin(self) -> None:
        """If there is a folder to keep it, compile the trivial kernel meanwhile on a GPU; elsewhere let the C++
        compiler prepare headers.

        An error here happens again, and is reported, in :meth:`start`.
        """
        if self.cache is None:
            return
        if self.device.type == "cuda":
            self._meanwhile(self._compile)
        else:
            self._prepare_headers(self.cache)

    def _prepare_headers(self, cache: Path) -> None:
        try:
            self._probes = self._probes or VectorProbes(cache)
            self._probes.assume()
            prepare = _header_to_prepare()
        except Exception as error:
            log.debug("headers are not prepared beforehand: %s", error)
            return
        if prepare is not None:
            self._meanwhile(prepare)

    def _meanwhile(self, prepare: Callable[[], Any]) -> None:
        self._preparing = Thread(target=self._prepare, args=(prepare,), name="toolchain", daemon=True)
        self._preparing.start()

    def start(self) -> float:
        """Compile a trivial kernel and return the seconds of all of the start, so that the first rung does not pay for
        it.

        In a job, files that its owner's earlier jobs left on the host save time. Raises the compiler's own
        error, such as on a machine without one.
        """
        if self._preparing is None and self.device.type == "cpu":
            self.begin()
        if self._preparing is not None:
            self._preparing.join()
        start = time.perf_counter()
        try:
            self._compile()
        except Exception:
            if self._probes is None or not self._probes.assumed:
                raise
            self._probes.forget()  # the assumptions about the processor may be the cause: torch finds out
            self._compile()
        else:
            if self._probes is not None:
                self._probes.keep()
        return self._seconds + time.perf_counter() - start

    def _compile(self) -> None:
        folder: AbstractContextManager[Any] = empty_caches() if self.cache is None else nullcontext()
        with folder:
            torch.compile(_trivial, backend="inductor", fullgraph=True)(torch.ones(64, device=self.device))
            forget_compiled()

    def _prepare(self, prepare: Callable[[], Any]) -> None:
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own
        try:
            prepare()
        except Exception as error:
            log.debug("code generation is not prepared beforehand: %s", error)
        self._seconds = time.perf_counter() - start


def _keep_headers(folder: Path) -> None:
    """Keep the C++ compiler's prepared headers in ``folder``, by the names that torch gives them.

    By default they are in the folder for temporary files, which differs for each job; making them takes longer than
    compiling most kernels.
    """
    place = folder / "precompiled_headers"
    set_internal("torch._inductor.codecache._HEADER_DIR", str(place))
    set_internal("torch._inductor.codecache._HEADER_LOCK_DIR", str(place / "locks"))


def _header_to_prepare() -> Callable[[], Any] | None:
    """Return a call that prepares the header of generated kernels, in the folder for headers alone, so that another
    thread may make it; ``None`` if torch names it otherwise.
    """
    prepares = internal_if_there(_PREPARES)
    bindings = internal_if_there("torch._inductor.codecache.CppPythonBindingsCodeCache")
    if prepares is None or bindings is None:
        return None
    asked: list[Callable[[], Any]] = []

    def note(*arguments: Any, **named: Any) -> str:
        asked.append(partial(prepares, *arguments, **named))
        return ""

    try:
        with patch(_PREPARES, note):
            bindings.load_pybinding_async(["float*"], _EMPTY, submit_fn=lambda build: None)
    finally:
        forget_compiled()
    return asked[0] if asked else None


def _trivial(value: torch.Tensor) -> torch.Tensor:
    """Compute with vector instructions, and a function that torch has for them."""
    return torch.exp(torch.relu(value)) + 1
