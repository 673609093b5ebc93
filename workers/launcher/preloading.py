"""Imports what ranks need before there are any, in the launcher from which they are forked."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable

from service.jobs.kinds.registry import KINDS
from workers.launcher.forked_ranks import threads

logger = logging.getLogger(__name__)


def preload_until(is_asked: Callable[[], bool]) -> None:
    """Import what one kind after the other names, until there is a request."""
    for kind in KINDS.provided:
        if is_asked():
            break
        preload(kind)


def preload(kind: str) -> None:
    """Import the modules that a kind names for it. What is wrong with one is for the ranks to say, which import it
    again.
    """
    for module in KINDS.declaration(kind).preloads:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if len(names := threads()) > 1:
        logger.warning(
            "preloads=%r of job kind %r start a thread (%s), so each rank imports everything anew; "
            "expected modules that start threads when they are used",
            KINDS.declaration(kind).preloads,
            kind,
            ", ".join(names),
        )
