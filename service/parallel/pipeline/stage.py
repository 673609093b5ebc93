"""Cutting a model into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


class PipelineModel(Protocol):
    """A model that is a chain: units before its blocks, blocks, units after them.

    ``blocks`` is keyed by the block's index in the whole model, so that parameter names do not depend on the cut.
    ``before_blocks`` and ``after_blocks`` name attributes that are ``None`` if a stage lacks the unit;
    ``forward`` maps the stage's input to its output and skips units that are ``None``.
    """

    blocks: nn.ModuleDict
    before_blocks: tuple[str, ...]
    after_blocks: tuple[str, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the stage."""


@dataclass(frozen=True)
class Part:
    """Says which share of a model a stage has: ``stage`` of ``stages``."""

    stage: int = 0
    stages: int = 1

    def blocks(self, total: int) -> range:
        """Return the indices of the stage's blocks; sizes differ by one at most, and earlier stages have the larger
        ones.

        The last stage also holds the head, which is why it is never the larger one.
        """
        if self.stages > total:
            raise ValueError(f"{total} blocks cannot be cut into {self.stages} stages")
        share, extra = divmod(total, self.stages)
        start = self.stage * share + min(self.stage, extra)
        return range(start, start + share + (self.stage < extra))

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def cut(model: PipelineModel, part: Part) -> None:
    """Drop everything outside ``part``; cut on the meta device, before any memory is taken."""
    kept = part.blocks(len(model.blocks))
    model.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items() if int(name) in kept})
    for name in () if part.is_first else model.before_blocks:
        setattr(model, name, None)
    for name in () if part.is_last else model.after_blocks:
        setattr(model, name, None)
