"""Memory that libraries take beside the tensors, and what they give back of it."""

from __future__ import annotations

import ctypes
import os

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
SMALL = ":1024:2"
"""KiB and how often: 2 MiB for each stream."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of ``mallopt`` in glibc's ``malloc.h``."""
KEPT, FROM_THE_SYSTEM = 2**27, 2**25
"""Bytes that are kept once they are free, and from which a block is the system's own; glibc takes no more for that."""


def keep_workspaces_small() -> None:
    """Give matrix products 2 MiB for each stream that they run on, instead of 32; before the process' first one.

    Bounds are products of large matrices, which need none. What the environment says otherwise stays.
    """
    os.environ.setdefault(CUBLAS, SMALL)


def keep_freed_memory() -> None:
    """Keep memory that is free again for the next tensor, up to 128 MiB, where the C library is glibc.

    A pass on a CPU takes and frees a few MiB at every step. Given back to the system each time, they come again page by
    page, filled with zeros, which takes several times as long as what is computed in them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, FROM_THE_SYSTEM)
        mallopt(TRIM_THRESHOLD, KEPT)
