"""Controls compile caches: for a true cold start, and for the start of a new process with a filled cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from service.jobs.files import atomic_write
from service.torch_internals.table import internal, internal_if_there

_FOLDERS = "trivet-compile-"


@contextmanager
def empty_caches() -> Iterator[Path]:
    """Compile into an empty cache folder, which is removed at the end."""
    with owned_folder() as folder:
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        forget_compiled()
        _forget_portable()
        try:
            yield folder
        finally:
            _restore(before)
            forget_compiled()


def take_machine_code(source: Path, target: Path) -> None:
    """Copy the C++ compiler's output in ``source`` to the cache folder ``target``. Inductor knows it by its
    source and flags: no portable cache holds it.
    """
    for built in source.glob("*/*.so"):
        place = target / built.relative_to(source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(place, built.read_bytes())


@contextmanager
def owned_folder() -> Iterator[Path]:
    """Yield a folder that this process has locked; it gets its name once it is locked."""
    made = Path(tempfile.mkdtemp(prefix="trivet-new-"))
    folder = made.with_name(made.name.replace("trivet-new-", _FOLDERS, 1))
    handle = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        made.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def clear_abandoned() -> None:
    """Remove the folders of processes that were killed: their locks are free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        try:
            handle = os.open(folder, os.O_RDONLY)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)


def forget_compiled() -> None:
    """Drop the process's caches in memory; the next call compiles again, helped only by the cache folder."""
    torch.compiler.reset()
    internal("torch._inductor.utils.clear_caches")()


def portable_cache() -> bytes | None:
    """Return the code compiled since the caches were emptied, for other processes; ``None`` if there is none.

    On a CPU it lacks the machine code, which is built again from its source unless the host has it
    (:func:`take_machine_code`).
    """
    saved = torch.compiler.save_cache_artifacts()
    return saved[0] if saved is not None else None


def _forget_portable() -> None:
    """Begin ``portable_cache`` anew; where torch cannot, the file is larger."""
    manager = internal_if_there("torch.compiler._cache.CacheArtifactManager")
    if hasattr(manager, "clear"):
        manager.clear()


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
