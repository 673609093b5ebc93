"""Runs a script of a job's author on every rank, in the rank's own process and confinement.

The ranks of a host share the folder in which the script's archive is unpacked; it ends with the attempt.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from service.formats.archive import ArchiveError
from service.formats.script import unpack_script
from service.jobs.runtime import WORKING, Completion, RefusedError, RunContext, ScriptRun, Stopwatch
from service.jobs.spec.script import ScriptSpec
from service.parallel import distributed

_POLL_S = 0.02


class ScriptExit(Exception):  # noqa: N818 - its name is what the author reads
    """The script ended with an exit code other than 0."""


def run(spec: ScriptSpec, context: RunContext) -> dict[str, Any] | None:
    """Run the script to its end; on rank 0, keep files and return the last values of its metrics."""
    folder = _unpacked(spec, context)
    os.chdir(folder)
    script = ScriptRun.of_process()
    script.follow(context)
    distributed.answer_environment()
    context.report.phase(WORKING)
    watch = Stopwatch()
    _run_as_main(folder / spec.entry, spec.args)
    _wait_for_others(folder.with_name(".ended"), context)
    if context.rank != 0:
        return None
    for path in _kept(folder, spec.keep, context.report.log):
        script.artifact(path, path.relative_to(folder).as_posix())
    done = Completion(done=int(script.is_whole), total=1, unit="scripts")
    return {"seconds": watch.seconds, **script.last, "completed": done}


def _unpacked(spec: ScriptSpec, context: RunContext) -> Path:
    """Return the script's folder, which the first rank of a host makes for all ranks there."""
    folder = Path(tempfile.gettempdir()) / "script"
    if context.local_rank == 0:
        draft = folder.with_name(".script")
        try:
            unpack_script(context.data.file(spec.archive), draft)
        except ArchiveError as error:
            raise RefusedError(f"archive: {error}") from error
        draft.rename(folder)
    while not folder.is_dir():  # if the first rank fails, torchrun ends this one
        time.sleep(_POLL_S)
    return folder.resolve()


def _wait_for_others(ended: Path, context: RunContext) -> None:
    """Tell that the script has ended here; on rank 0, wait until it has everywhere, since others may still write."""
    ended.mkdir(exist_ok=True)
    (ended / str(context.rank)).touch()
    while context.rank == 0 and len([*ended.iterdir()]) < context.world_size:  # if one fails, torchrun ends this one
        time.sleep(_POLL_S)


def _kept(folder: Path, patterns: Sequence[str], tell: Callable[[str], None]) -> list[Path]:
    """Return the files in the script's folder that match a pattern, each once; links are left out. Tells of patterns
    without any.
    """
    found: set[Path] = set()
    for pattern in patterns:
        inner = f"{pattern}/*" if pattern.endswith("**") else pattern  # which is folders alone before Python 3.13
        files = {path for path in folder.glob(inner) if path.is_file() and path.resolve() == path}
        if not files:
            tell(f"nothing is kept by {pattern!r}: it matches no file in the script's folder")
        found |= files
    return sorted(found)


def _run_as_main(path: Path, arguments: Sequence[str]) -> None:
    """Run a file as ``python PATH ARGUMENTS`` would, but in this process. Raises what it raises, and
    :class:`ScriptExit`.
    """
    own, before = os.getpid(), set(threading.enumerate())
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    code: object = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        if os.getpid() == own:
            raise
        traceback.print_exc()
        code = 1
    finally:
        _flush_output()
    if os.getpid() != own:  # a fork that ran past the script's end: only the rank goes on
        os._exit(code if isinstance(code, int) else int(code is not None))
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()
    if code not in (None, 0):
        said = f"with exit code {code}" if isinstance(code, int) else f"saying: {code}"
        raise ScriptExit(f"the script ended {said}")


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed or replaced it
            stream.flush()
