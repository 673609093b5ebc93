"""Checkpoints that any layout can load, published atomically.

A folder ``step_<n>`` appears under its name only when it is complete and on disk; its ``meta.json`` lists the files
with their sizes and digests.
"""

from service.jobs.files import META, Checkpoint, complete, incomplete, read, require
from service.parallel.checkpoint.saver import BackgroundSaver, CheckpointError, DirectSaver, Saver
from service.parallel.checkpoint.storage import PublishError, damage, discard, load, load_whole, on_first_rank, save
from service.parallel.checkpoint.stored import digest_of, first_damaged, stored

__all__ = [
    "META",
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointError",
    "DirectSaver",
    "PublishError",
    "Saver",
    "complete",
    "damage",
    "digest_of",
    "discard",
    "first_damaged",
    "incomplete",
    "load",
    "load_whole",
    "on_first_rank",
    "read",
    "require",
    "save",
    "stored",
]
