"""Gives a script of a job's author what it may ask the service for: reports, a folder that stays, whether to stop."""

from __future__ import annotations

import mimetypes
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

from service.jobs.files import DataLayout, JobPaths
from service.jobs.runtime.reporting import RankReporter
from service.jobs.runtime.run_context import RunContext

MOST_RESULTS = 256
"""The most metrics whose last values are a script's result: it goes into every list of jobs."""
_FOLDER = "script"
"""Where a script's own checkpoints are, beside those that Trivet would understand."""


class ScriptRun:
    """A rank of a job of kind ``script``, as its script sees it; also in processes that the script starts.

    ``last`` has the last values that this process reported, by name.
    """

    def __init__(self, paths: JobPaths, attempt: int, rank: int) -> None:
        self._paths, self._rank = paths, rank
        self._report = RankReporter(None, rank, paths, attempt)
        self.last: dict[str, float] = {}
        self._should_stop: Callable[[], bool] = lambda: False
        self._asks = False

    @classmethod
    @cache
    def of_process(cls) -> ScriptRun:
        """Return this process's one, by the environment of ranks. Raises ``KeyError`` outside of a job."""
        paths = DataLayout(Path(os.environ["TRIVET_DATA"])).job(os.environ["TRIVET_JOB"])
        return cls(paths, int(os.environ["TRIVET_ATTEMPT"]), int(os.environ["RANK"]))

    def follow(self, context: RunContext) -> None:
        """Let the script know when its attempt is asked to stop."""
        self._should_stop = context.should_stop

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        """Report values of a step; those of rank 0 count."""
        if self._rank != 0:
            return
        self._report.metric(step, values)
        kept = {name: value for name, value in values.items() if name in self.last or len(self.last) < MOST_RESULTS}
        self.last.update(kept)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Report how much of the work is done; rank 0's word counts."""
        if self._rank == 0:
            self._report.progress(done, total, unit)
            self._report.flush()

    def artifact(self, path: Path, name: str) -> None:
        """Copy a file or folder under a name to the job's artifacts; the script may then change its own.

        Raises ``OSError``, and ``ValueError`` for a name that is no path within them.
        """
        inner = PurePosixPath(name)
        if inner.is_absolute() or ".." in inner.parts or not inner.parts:
            raise ValueError(f"artifact {name!r}: expected a path such as out/model.pt")
        target = self._paths.artifacts / inner
        partial = target.with_name(f".{target.name}.{self._rank}.part")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(path, partial)
            shutil.rmtree(target, ignore_errors=True)
        else:
            shutil.copyfile(path, partial)
        partial.rename(target)
        self._report.artifact(target, mimetypes.guess_type(target.name)[0] or "application/octet-stream")

    def checkpoint_dir(self) -> Path:
        """Return the folder that each attempt of the job finds as the one before left it."""
        return self._paths.checkpoints / _FOLDER

    def stopping(self) -> bool:
        """Return whether the attempt is asked to stop; it is then over when the script ends."""
        self._asks = True
        return self._should_stop()

    @property
    def is_whole(self) -> bool:
        """Return whether a script that has ended did so by itself, and not because it was asked to stop."""
        return not (self._asks and self._should_stop())
