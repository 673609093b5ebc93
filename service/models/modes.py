"""Keeps modules in training or in evaluation mode as their authors want them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave each part of the modules in training or in evaluation mode as it was: some may always be in evaluation. A
    ``train`` of their own is called, which may do more than set the mode.
    """
    roots = list(modules)
    were = [(part, part.training) for module in roots for part in module.modules()]
    modes = [module.training for module in roots]
    try:
        yield
    finally:
        for module, mode in zip(roots, modes, strict=True):
            module.train(mode)
        for part, was in were:
            part.training = was


def begin_training(model: nn.Module) -> None:
    """Put a model in training mode, but for parts that its constructor or its own ``train`` leaves in evaluation."""
    resting = [part for part in model.modules() if not part.training]
    model.train()
    for part in resting:
        part.training = False
