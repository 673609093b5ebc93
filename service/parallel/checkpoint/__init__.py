"""Checkpoints that any layout can load, published atomically.

A folder ``step_<n>`` appears under its name only when it is complete and on disk; its ``meta.json`` lists the files.
"""

from service.jobs.checkpoints import META, Checkpoint, complete, latest, read, require
from service.parallel.checkpoint.saver import BackgroundSaver, CheckpointError, DirectSaver, Saver
from service.parallel.checkpoint.storage import PublishError, load, load_whole, on_first_rank, save
from service.parallel.checkpoint.stored import stored

__all__ = [
    "META",
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointError",
    "DirectSaver",
    "PublishError",
    "Saver",
    "complete",
    "latest",
    "load",
    "load_whole",
    "on_first_rank",
    "read",
    "require",
    "save",
    "stored",
]
