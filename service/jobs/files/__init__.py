"""Keeps the files of the data folder: where each lies, how one is written whole, and how one is read safely.

``layout`` has the places, ``atomic`` and ``safe_files`` the ways to write and read, ``checkpoints`` and ``cache`` two
kinds of folders, ``disk`` what is said of a full one. ``objects``, files in an object store, is imported by its own
name: it needs pydantic, which ranks' launchers do without.
"""

from service.jobs.files.atomic import atomic_draft, atomic_write, flush, set_aside
from service.jobs.files.cache import OF_OWNER, trim, used
from service.jobs.files.checkpoints import (
    DESCRIPTION,
    DIGESTS,
    FILES,
    META,
    WEIGHTS,
    Checkpoint,
    complete,
    described,
    finished,
    incomplete,
    read,
    require,
    signed,
    steps_of_checkpoints,
    steps_of_weights,
)
from service.jobs.files.disk import DISK_FULL, free_bytes, full_disk
from service.jobs.files.layout import DataLayout, JobPaths
from service.jobs.files.safe_files import Entry, Folder, UnsafePathError, remove_tree

__all__ = [
    "DESCRIPTION",
    "DIGESTS",
    "DISK_FULL",
    "FILES",
    "META",
    "OF_OWNER",
    "WEIGHTS",
    "Checkpoint",
    "DataLayout",
    "Entry",
    "Folder",
    "JobPaths",
    "UnsafePathError",
    "atomic_draft",
    "atomic_write",
    "complete",
    "described",
    "finished",
    "flush",
    "free_bytes",
    "full_disk",
    "incomplete",
    "read",
    "remove_tree",
    "require",
    "set_aside",
    "signed",
    "steps_of_checkpoints",
    "steps_of_weights",
    "trim",
    "used",
]
