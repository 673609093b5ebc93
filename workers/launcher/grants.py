"""Holds what ranks are granted, before anything is granted: a path says only what was there a moment ago.

What a spec names lies in folders where other jobs' ranks may have written. It is opened step by step below the folder
of the service's data, without following a link, and mounts and rules of Landlock are made on the descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.jobs.safe_files import Folder, UnsafePathError


class UnsafeGrantError(Exception):
    """Something else stands in the place of a path that a spec names."""


@dataclass(frozen=True)
class Grant:
    """An open file or folder (``O_PATH``), and the path to it, without links."""

    path: Path
    descriptor: int


@contextmanager
def held(paths: Iterable[Path], covered: Iterable[Path]) -> Iterator[list[Grant]]:
    """Hold the existing ones of ``paths`` while the block runs.

    Raises :class:`UnsafeGrantError` for a path below a covered folder that leads over a link; others are the
    operator's, and may be links.
    """
    roots = list(covered)
    with ExitStack() as stack:
        grants = []
        for path in paths:
            try:
                grant = _open(path, next((root for root in roots if path.is_relative_to(root) and path != root), None))
            except UnsafePathError as error:
                raise UnsafeGrantError(f"{path}, which a job was to use, leads over a link: {error}") from error
            except OSError:  # it does not exist, or is not ours to open: there is nothing to grant
                continue
            stack.callback(os.close, grant.descriptor)
            grants.append(grant)
        yield grants


def _open(path: Path, root: Path | None) -> Grant:
    if root is None:
        resolved = path.resolve()
        return Grant(resolved, os.open(resolved, os.O_PATH | os.O_CLOEXEC))
    with Folder.open(root.resolve()) as folder:
        name = path.relative_to(root)
        return Grant(folder.path / name, folder.handle(name.as_posix()))
