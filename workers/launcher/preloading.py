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
    """Import the runner of one kind after the other, the ranks' share of a start, until there is a request."""
    for kind in KINDS.provided:
        if is_asked():
            break
        preload(kind)


def preload(kind: str) -> None:
    """Import the runner of a kind that is declared ``forkable``. What is wrong with it is for the ranks to say, which
    import it again.
    """
    declaration = KINDS.declaration(kind)
    if not declaration.forkable:
        return
    with contextlib.suppress(Exception):
        importlib.import_module(declaration.runner.partition(":")[0])
    if len(names := threads()) > 1:
        logger.warning(
            "importing the runner of job kind %r starts a thread (%s), so each rank imports it anew; "
            "expected a kind that is declared with forkable=False, or one that starts threads when it runs",
            kind,
            ", ".join(names),
        )
