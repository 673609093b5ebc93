"""Pays in advance what the first generated kernel of a process costs: finding compilers, precompiling headers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from service.compilation.torch_internals.caches import empty_caches


def keep_headers(folder: Path) -> None:
    """Let headers that the C++ compiler has prepared stay in ``folder``, as torch 2.11 to 2.13 name their place.

    By default they are in the folder for temporary files, which is another one for each job; making them takes longer
    than compiling most kernels.
    """
    from torch._inductor import codecache  # noqa: PLC0415 - brings Inductor, which other rungs do without

    code: Any = codecache
    if hasattr(code, "_HEADER_DIR") and hasattr(code, "_HEADER_LOCK_DIR"):
        code._HEADER_DIR = str(folder / "precompiled_headers")
        code._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")


def own_cache() -> Path | None:
    """Return the folder that outlives this job, of this host and the job's owner; ``None`` outside of a job."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415 - brings Inductor

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it too, to what it takes without
    return Path(folder) if folder and folder != default_cache_dir() else None


def start_toolchain(device: torch.device) -> float:
    """Compile a trivial kernel and return the seconds it took, so that the first rung does not pay for it.

    Raises what the compiler raises, as it does on a machine that has none.
    """
    with empty_caches():
        start = time.perf_counter()
        torch.compile(_trivial, backend="inductor", fullgraph=True)(torch.ones(4, device=device))
        return time.perf_counter() - start


def _trivial(value: torch.Tensor) -> torch.Tensor:
    return torch.relu(value) + 1
