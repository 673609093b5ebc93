"""Keeps bounds in full float32."""

from __future__ import annotations

import torch


def forbid_tf32() -> None:
    """Let this process compute no product and no convolution of float32 in TF32, whose factors have ten bits.

    cuDNN's convolutions have a setting of their own, which is on by default.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
