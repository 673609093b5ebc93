"""Memory that libraries take beside the tensors."""

from __future__ import annotations

import os

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
SMALL = ":1024:2"
"""KiB and how often: 2 MiB for each stream."""


def keep_workspaces_small() -> None:
    """Give matrix products 2 MiB for each stream that they run on, instead of 32; before the process' first one.

    Bounds are products of large matrices, which need none. What the environment says otherwise stays.
    """
    os.environ.setdefault(CUBLAS, SMALL)
