"""Pays the costs of a process's first generated kernel in advance: it finds compilers and precompiles headers.

The results are kept in a folder of the host that outlives the job, for the next one.
"""

from __future__ import annotations

import logging
import os
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
from service.models.host_compiler import VectorProbes, keep_headers, own_cache
from service.torch_internals.table import internal_if_there

log = logging.getLogger(__name__)
_PREPARES = "torch._inductor.codecache._precompile_header"
_EMPTY = 'extern "C" void kernel(float* out) {}'


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
            keep_headers(self.cache)
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
