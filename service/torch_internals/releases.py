"""Knows the releases of torch that Trivet was tried with."""

from __future__ import annotations

import re
from collections.abc import Sequence

TRIED = ("2.11", "2.13", "2.14")
"""The releases of torch on which the tests ran, as docs/run/deploy.md says in full: a row there for each one here."""


def release_of(version: str) -> tuple[int, int]:
    """Return the release, ``(2, 14)``, of a version like ``2.14.1+cu130``. Raises ``ValueError`` for another form."""
    if (found := re.match(r"(\d+)\.(\d+)", version)) is None:
        raise ValueError(f"{version!r} is no version of torch; expected one like {TRIED[-1]}.0")
    return int(found[1]), int(found[2])


def is_tried(version: str) -> bool:
    """Return whether Trivet was tried with the release of this version of torch; false for what is no version."""
    found = re.match(r"\d+\.\d+(?!\d)", version)
    return found is not None and found[0] in TRIED


def listed(releases: Sequence[str]) -> str:
    """Return releases as a sentence names them: ``torch 2.11, 2.13 or 2.14``."""
    *first, last = releases
    return f"torch {', '.join(first)} or {last}" if first else f"torch {last}"
