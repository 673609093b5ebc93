"""Lets the first rank make a file that all ranks read."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from service.jobs.atomic import flush
from service.jobs.cache import used

_POLL_S = 0.1


def build_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return ``path``, made by the first rank if it is missing; the others wait for it, however long that takes.

    ``make`` writes a file or folder at the path that it is given. It appears as ``path`` only when it is complete and
    on disk: nobody checks it later, so a file that a power loss cut short would pass for whole.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        # No collective: it could time out. If the first rank fails, the launcher ends this one.
        while not path.exists():
            time.sleep(_POLL_S)
    elif not path.exists():
        _make(path, make)
    else:
        used(path)
    return path


def _make(path: Path, make: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=".making-", dir=path.parent))
    try:
        made = working / path.name
        make(made)
        for file in (made, *made.rglob("*")):
            flush(file)
        made.rename(path)
        flush(path.parent)
    except OSError:
        if not path.exists():  # another job has made it meanwhile
            raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
