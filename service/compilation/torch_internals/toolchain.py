"""Pays in advance what the first generated kernel of a process costs: finding compilers, precompiling headers."""

from __future__ import annotations

import time

import torch

from service.compilation.torch_internals.caches import empty_caches


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
