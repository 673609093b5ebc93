"""Controls random draws and precision while a rung is compared with eager."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from service.compilation.instruments.switches import eager_random_numbers
from service.compilation.instruments.tf32 import full_float32
from service.compilation.run.baseline import Reference
from service.compilation.rungs import Rung


def precision(reference: Reference) -> AbstractContextManager[None]:
    """Forbid TF32 if it would hide errors."""
    return full_float32() if reference.hidden_by_tf32 else nullcontext()


def random_numbers(rung: Rung, reference: Reference) -> AbstractContextManager[Any]:
    """Make generated code draw the same random numbers as eager, if it draws any."""
    return eager_random_numbers() if draws_like_eager(rung, reference) else nullcontext()


def draws_like_eager(rung: Rung, reference: Reference) -> bool:
    """Return whether the rung is compared with eager's own draws, which no job has."""
    return rung.compiles_backward and reference.eager.random
