"""Records the actions of Inductor's CUDA-graph trees: recordings, skips with their reasons, repeated recordings.

A count of 0 skips proves nothing: a partitioned graph that is not captured counts none. Only the recording itself
proves a capture, and launches in a profile. What a version of torch lacks of the manager of graphs is left out here,
and the launches still prove captures.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from service.compilation.evidence import CudaGraphs, Reason
from service.compilation.instruments.text import first_line
from service.torch_internals.table import internal

_SKIPPING = re.compile(r"skipping cudagraphs? (?:due to|because)\s*", re.IGNORECASE)


@dataclass
class Captures:
    """Recordings by iteration, and the compiler's reasons for those that it skipped."""

    recorded: list[int] = field(default_factory=lambda: [0])
    said: Counter[str] = field(default_factory=Counter)

    def note(self, arguments: Any) -> None:
        """Count a recording when a compile callback announces a CUDA graph."""
        if "CUDAGRAPH" in str(getattr(arguments, "callback_trigger", "")).upper():
            self.recorded[-1] += 1

    def end_iteration(self) -> bool:
        """Close an iteration; true if anything was recorded in it."""
        self.recorded.append(0)
        return self.recorded[-2] > 0

    def evidence(self, device: torch.device, steady: int) -> CudaGraphs:
        """Return the fate of CUDA graphs; from iteration ``steady`` on nothing should be recorded any more."""
        skips = [Reason(text, count) for text, count in self.said.items()]
        unsaid = int(internal("torch._dynamo.utils").counters["inductor"]["cudagraph_skips"]) - sum(self.said.values())
        if unsaid > 0:
            skips.append(Reason("a skip that Inductor counted without a reason", unsaid))
        late = tuple(index for index, count in enumerate(self.recorded) if index >= steady and count)
        made = max(sum(self.recorded), _made(device))
        return CudaGraphs(made, tuple(skips), tuple(_again(device)), late, tuple(self.recorded))


@contextmanager
def watched_captures() -> Iterator[Captures]:
    """Count recordings and reasons within; begin after a reset of Dynamo, which forgets callbacks."""
    captures = Captures()
    with ExitStack() as stack:
        _callbacks().register_start_callback(captures.note)
        stack.callback(_forget, captures)
        logger, handler = internal("torch._inductor.cudagraph_utils.cudagraphs_log"), _Skips(captures)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        yield captures


class _Skips(logging.Handler):
    """Collects the reasons from logs: most reach no counter and no record of compilations."""

    def __init__(self, captures: Captures) -> None:
        super().__init__(logging.WARNING)
        self.captures = captures

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "skipping cudagraph" in text.lower():
            self.captures.said[first_line(_SKIPPING.sub("", text))] += 1


def _forget(captures: Captures) -> None:
    if captures.note in _callbacks().start_callbacks:  # a reset may have removed it
        _callbacks().remove_start_callback(captures.note)


def _callbacks() -> Any:
    return internal("torch._dynamo.callback.callback_handler")


def _manager(device: torch.device) -> Any:
    """Return the trees of this thread's device; ``None`` if there are none."""
    if device.type != "cuda":
        return None
    manager_of = internal("torch._inductor.cudagraph_trees.get_manager")
    try:
        index = device.index if device.index is not None else torch.cuda.current_device()
        return manager_of(index, create_if_none_exists=False)
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError):
        return None


def _made(device: torch.device) -> int:
    """Return the number of graphs that the trees have numbered; a counter of itertools shows its next value."""
    found = re.search(r"count\((\d+)\)", repr(getattr(_manager(device), "graph_counter", None)))
    return int(found[1]) if found else 0


def _again(device: torch.device) -> Iterator[Reason]:
    """Yield the functions that were recorded again without being asked for another shape."""
    per_node = getattr(_manager(device), "num_rerecord", None) or {}
    totals: Counter[str] = Counter()
    for by_function in per_node.values():
        for function, count in by_function.items():
            totals[f"function {getattr(function, 'id', function)}: a static input or a pending output changed"] += count
    yield from (Reason(text, count) for text, count in totals.items())


def graph_results(device: torch.device) -> list[Tensor]:
    """Return all memory that the graphs of this round of replays have filled and that is still held, as bytes.

    It includes a call's results, tensors left in attributes, and those saved for its backward.
    """
    node = getattr(_manager(device), "current_node", None)
    live = getattr(node, "path_live_weakrefs", None)
    pointers = [] if live is None else [pointer for reference in live() if (pointer := reference()) is not None]
    storage_at = internal("torch.UntypedStorage._new_with_weak_ptr")
    storages = [storage_at(pointer) for pointer in pointers]
    return [torch.empty(0, dtype=torch.uint8, device=device).set_(storage) for storage in storages]
