"""A disk that is full, put in place of a call that writes."""

from __future__ import annotations

import errno


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
