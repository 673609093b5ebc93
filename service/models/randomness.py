"""Seeds everything that draws random numbers, so that what is random follows from a job's seed.

Nothing of a generator's state is kept: a step begins from a seed of its own. So a run that is resumed repeats the one
that went on, however often that was evaluated or what else has drawn numbers in between.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from service.models.initialize import key_of


def seed_all(seed: int, *place: object) -> None:
    """Seed the generators of torch, on every device, of NumPy and of Python, for one place in a job: a step, a rank."""
    torch.manual_seed(key := _key(seed, place))
    _seed_others(key)


def _key(seed: int, place: tuple[object, ...]) -> int:
    return key_of(seed, ":".join(map(str, place)))


def _seed_others(key: int) -> None:
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@contextmanager
def seeded(seed: int, *place: object) -> Iterator[None]:
    """Seed the generators of the CPU within, and leave them as they were."""
    with torch.random.fork_rng(devices=[]), drawing_from(others()):
        torch.default_generator.manual_seed(key := _key(seed, place))
        _seed_others(key)
        yield


def others() -> tuple[Any, ...]:
    """Return the states of the generators of Python and of NumPy, which torch does not keep."""
    return random.getstate(), np.random.get_state()


def drawn(device: torch.device) -> str:
    """Return a digest of the generators' states: another one once something was drawn on the host or ``device``."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    held = [each.numpy().tobytes() for each in states]
    return hashlib.blake2b(repr((held, others())).encode()).hexdigest()


@contextmanager
def drawing_from(states: tuple[Any, ...]) -> Iterator[None]:
    """Draw from these :func:`others` within, and leave them as they were."""
    before = others()
    _set_others(states)
    try:
        yield
    finally:
        _set_others(before)


def _set_others(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
