"""Makes the folder of an attempt, and reads its ranks' result."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson

from service.jobs.layout import JobPaths
from service.jobs.runtime import LARGEST_RESULT, RESULT
from service.jobs.safe_files import Folder

logger = logging.getLogger(__name__)


def open_attempt(paths: JobPaths, number: int) -> Folder:
    """Open the folder of an attempt, and make all folders in which its ranks may write.

    Raises :class:`OSError` where something else stands in their place.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with Folder.open(paths.root) as root:
        for path in (paths.artifacts, paths.checkpoints, paths.published, paths.work(number)):
            root.make(path.relative_to(paths.root).as_posix()).close()
        return root.folder(paths.attempt(number).relative_to(paths.root).as_posix())


def read_result(work: Path) -> Any:
    """Return the result that rank 0 left; None if none can be read."""
    try:
        with Folder.open(work) as folder:
            return orjson.loads(folder.read(RESULT, LARGEST_RESULT))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the result of rank 0 cannot be read: %s", error)
        return None
