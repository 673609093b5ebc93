"""Digests of files: written with them, and compared when they are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_damaged(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return the first of the files in ``folder``, by name, whose content has another digest; ``None`` if none has.

    All ranks call it together: each reads its share of the files. Raises ``OSError`` for one that cannot be read.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = sorted(digests)
    own = (index for index in range(rank, len(names), ranks))
    wrong = (index for index in own if digest_of(folder / names[index]) != digests[names[index]])
    found = torch.tensor(next(wrong, len(names)))
    if ranks > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return None if found == len(names) else names[int(found)]
