"""Detects whether a program checkpoints activations, in either of torch's ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from service.torch_internals.table import internal

_FRAME = "torch.utils.checkpoint._CheckpointFrame"
"""Made for each checkpointed call; of the functions around it, torch 2.14 calls others than 2.13."""


@contextmanager
def counted_checkpoints() -> Iterator[list[str]]:
    """Note each checkpointed call of eager code, within."""
    seen: list[str] = []

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            seen.append(run.__name__)
            return run(*arguments, **named)

        return noted

    reentrant = internal("torch.utils.checkpoint.CheckpointFunction")
    with patch(_FRAME, noting(internal(_FRAME))), patch.object(reentrant, "apply", noting(reentrant.apply)):
        yield seen
