"""Reports from a script of your own: curves, progress and files, and a folder from which it goes on after a restart.

In a job of kind ``script`` the reports go to the job's page; anywhere else they are printed, so the script runs as it
is. Every rank may make these calls; of metrics and progress, rank 0's count. Importing this takes no time: neither
torch nor the client is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

__all__ = ["artifact", "checkpoint_dir", "metric", "progress", "resumed", "stopping"]


def metric(step: int, values: Mapping[str, float] | None = None, /, **named: float) -> None:
    """Report numbers of a step by name: ``metric(epoch, loss=0.3)``. The last values are the job's result.

    Raises ``TypeError`` or ``ValueError`` for what is no number.
    """
    _run().metric(int(step), {name: float(value) for name, value in {**(values or {}), **named}.items()})


def progress(done: int, total: int, unit: str = "steps") -> None:
    """Report that so much of the work is done."""
    _run().progress(int(done), int(total), unit)


def artifact(path: str | os.PathLike[str], name: str | None = None) -> None:
    """Keep a file or folder, as it is now, under its name or another. Raises ``FileNotFoundError``."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"artifact {file}: there is no such file")
    _run().artifact(file, name or file.name)


def checkpoint_dir() -> Path:
    """Return a folder that later attempts find as it was left; outside of a job it is ``checkpoints`` where the script
    runs.
    """
    folder = _run().checkpoint_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def resumed() -> bool:
    """Return whether an earlier attempt left something in :func:`checkpoint_dir`."""
    folder = _run().checkpoint_dir()
    return folder.is_dir() and any(folder.iterdir())


def stopping() -> bool:
    """Return whether the script should write a checkpoint and end, since its job was cancelled or has to make room.

    Ranks may hear of it at different steps: let them agree, by an ``all_reduce``, before one of them stops.
    """
    return _run().stopping()


class _AnyRun(Protocol):
    def metric(self, step: int, values: Mapping[str, float]) -> None: ...
    def progress(self, done: int, total: int, unit: str) -> None: ...
    def artifact(self, path: Path, name: str) -> None: ...
    def checkpoint_dir(self) -> Path: ...
    def stopping(self) -> bool: ...


class _PrintedRun:
    """Prints what rank 0 reports, outside of a job."""

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        self._say(f"{step}: {', '.join(f'{name} {value:g}' for name, value in values.items())}")

    def progress(self, done: int, total: int, unit: str) -> None:
        self._say(f"{done} of {total} {unit}")

    def artifact(self, path: Path, name: str) -> None:
        self._say(f"artifact {name}: {path}")

    def checkpoint_dir(self) -> Path:
        return Path("checkpoints")

    def stopping(self) -> bool:
        return False

    def _say(self, line: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(line, flush=True)  # noqa: T201 - its reader is at the terminal


@cache
def _run() -> _AnyRun:
    if "TRIVET_JOB" not in os.environ:
        return _PrintedRun()
    from service.jobs.runtime import ScriptRun  # noqa: PLC0415 - only ranks have it, and have imported it

    return ScriptRun.of_process()
