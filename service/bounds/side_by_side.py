"""Parts of a computation on a CPU, side by side on threads of which each computes by itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

MOST = 8
"""Threads: more of them wait for Python's lock."""


def are_worthwhile(total: int, at_once: int) -> bool:
    """Return whether there are threads for more than one part, and no gradient, whose graph is of one thread."""
    return total > at_once and torch.get_num_threads() > 1 and not torch.is_grad_enabled()


def side_by_side(total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
    """Call ``run`` for slices of ``range(total)`` with at most ``at_once`` entries each, and no gradients.

    Torch divides each operation among its threads, which wait for each other after each; those of a small part take
    longer for that than for the operation. Here a thread has parts of its own. There are as many parts for each.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MOST, -(-total // at_once))
    rounds = -(-total // (at_once * workers))
    size = -(-total // (rounds * workers))
    parts = [slice(start, min(total, start + size)) for start in range(0, total, size)]
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        return list(pool.map(torch.no_grad()(run), parts))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
