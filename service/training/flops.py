"""Arithmetic of a model: parameters, floating-point operations, and how much of a device's peak they use."""

from __future__ import annotations

from torch import nn

# Dense bf16 peak in FLOP/s from NVIDIA's data sheets, SXM parts; the longest matching name wins.
_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def count_parameters(whole: nn.Module) -> int:
    """Return the number of elements of all parameters of an unsharded model (on ``meta``, say)."""
    return sum(parameter.numel() for parameter in whole.parameters())


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a CUDA device by its name; None when it isn't known."""
    return next((_PEAKS[name] for name in sorted(_PEAKS, key=len, reverse=True) if device_name.startswith(name)), None)
