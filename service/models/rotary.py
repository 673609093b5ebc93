"""Rotary positions (Su et al., 2021)."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor, nn

from service.jobs.spec.families.transformer import RopeScaling


class Rotary(nn.Module):
    """Rotates the two halves of each head by angles that grow with the position: ``(batch, heads, seq, head_dim)``.

    The tables are float32 buffers that no precision policy casts and no state dict holds; blocks share one instance.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        # Real on the CPU even where parameters are only planned on the meta device: nobody fills buffers later.
        with torch.device("cpu"):
            angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies(head_dim, theta, scaling))
            self.register_buffer("cos", angles.cos().float(), persistent=False)
            self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per position of each pair, float64 ``(head_dim / 2,)``.

    Scaling (Llama 3.1) divides those by ``factor`` that turn less than ``low_freq_factor`` times over the original
    sequence, leaves those that turn more than ``high_freq_factor`` times, and goes linearly from one to the other.
    """
    own = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return own
    turns = scaling.original_sequence * own / (2 * pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return own * (kept + (1 - kept) / scaling.factor)
