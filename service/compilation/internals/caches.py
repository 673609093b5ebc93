"""Compile caches: a true cold start, and what a new process with a filled cache would see."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._inductor.utils import clear_caches


@contextmanager
def empty_caches() -> Iterator[Path]:
    """Compile into an empty cache folder, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="trivet-compile-", ignore_cleanup_errors=True) as folder:
        variables = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        forget_compiled()
        _forget_portable()
        try:
            yield Path(folder)
        finally:
            _restore(before)
            forget_compiled()


def forget_compiled() -> None:
    """Drop what the process holds in memory; the next call compiles again, helped only by the cache folder."""
    torch.compiler.reset()
    clear_caches()


def portable_cache() -> bytes | None:
    """What was compiled since the caches were emptied, to be given to other processes; ``None``: nothing to give.

    On a CPU it lacks the machine code, which is built again from its source.
    """
    saved = torch.compiler.save_cache_artifacts()
    return saved[0] if saved is not None else None


def _forget_portable() -> None:
    """Begin anew what ``portable_cache`` gives; private on torch 2.11 to 2.13, and without it the file is larger."""
    try:
        from torch.compiler._cache import CacheArtifactManager  # noqa: PLC0415

        CacheArtifactManager.clear()
    except (ImportError, AttributeError):
        return


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
