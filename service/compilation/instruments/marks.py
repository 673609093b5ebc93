"""Observes step marks of any origin, and whether a backward is running, or CUDA graphs wait for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from service.torch_internals.table import internal

_MARK = "torch._inductor.cudagraph_trees.mark_step_begin"
internal(_MARK)  # brings Inductor now, before processes that climb are forked from the process that imports this


@contextmanager
def heard_marks(hear: Callable[[], None]) -> Iterator[None]:
    """Call ``hear`` at each step mark within, before it takes effect.

    ``torch.compiler.cudagraph_mark_step_begin`` calls ``cudagraph_trees.mark_step_begin``, so the latter also sees
    calls of the former imported by name.
    """
    mark = internal(_MARK)

    def heard() -> None:
        hear()
        mark()

    with patch(_MARK, heard):
        yield


def graphs_wait(device: torch.device) -> bool | None:
    """Return whether CUDA graphs have run a forward and no backward since; ``None`` if there are none, or they
    do not tell.

    They do not know which forward, nor that its graph may be gone: so it is evidence, and not a verdict.
    """
    if device.type != "cuda":
        return None
    manager_of = internal("torch._inductor.cudagraph_trees.get_manager")
    try:
        manager = manager_of(torch.cuda.current_device(), create_if_none_exists=False)
    except (AttributeError, RuntimeError, AssertionError, TypeError):  # another thread's, or another version
        return None
    waits = getattr(manager, "running_forwards_with_pending_backwards", None)
    return None if waits is None else bool(waits)
