"""Names what goes wrong in a program: by the program, what it was doing, and the memory that it holds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from service.bounds.memory import is_out_of_memory
from service.jobs.runtime import RefusedError
from service.training.gradients import NonFiniteError
from service.training.step_totals import held_gib


class ProgramError(RuntimeError):
    """A program failed, or did something that a program must not do."""


class LackingError(RefusedError, ValueError):
    """A program lacks what the spec asks of it."""


class Blame:
    """Names the program ``name`` in its errors."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._held = ""

    def note_memory(self, step: int) -> None:
        """Remember the memory in use after the first step for which this is called."""
        self._held = self._held or f"after step {step}: {held_gib(self._device):.2f} GiB, "

    @contextmanager
    def of(self, doing: str) -> Iterator[None]:
        """Raise :class:`ProgramError` that says what the program was doing, for its errors."""
        try:
            yield
        except (RefusedError, NonFiniteError, ProgramError):
            raise
        except Exception as error:
            memory = self._in_use() if is_out_of_memory(error) else ""
            raise self.error(doing, f"{type(error).__name__}: {error}{memory}") from error

    def error(self, doing: str, what: str) -> ProgramError:
        """Return an error about what the program did wrong."""
        return ProgramError(f"program {self._name!r}, {doing}: {what}")

    def _in_use(self) -> str:
        """Say how much more memory is in use than after the first step, and of which tensors there are most."""
        # As text: a compiler's tensors may have sizes that are symbols, which do not hash.
        alive = Counter(f"{tuple(each.shape)}, {each.dtype}" for each in gc.get_objects() if type(each) is Tensor)
        most = [f"; {count:,} tensors of shape {kind}" for kind, count in alive.most_common(1)]
        return f" (in use {self._held}now: {held_gib(self._device):.2f} GiB{''.join(most)})"
