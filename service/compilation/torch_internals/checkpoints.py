"""Detects whether a program checkpoints activations: both ways are private, and the same in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint

_WITHOUT_REENTRANT = "_checkpoint_without_reentrant_generator"


@contextmanager
def counted_checkpoints() -> Iterator[list[str]]:
    """Note each checkpointed call of eager code, within."""
    seen: list[str] = []

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            seen.append(run.__name__)
            return run(*arguments, **named)

        return noted

    with (
        patch.object(checkpoint, _WITHOUT_REENTRANT, noting(getattr(checkpoint, _WITHOUT_REENTRANT))),
        patch.object(checkpoint.CheckpointFunction, "apply", noting(checkpoint.CheckpointFunction.apply)),
    ):
        yield seen
