"""Arithmetic of a model: parameters, floating-point operations, and how much of a device's peak they use."""

from __future__ import annotations

from torch import nn

from service.jobs.spec.model import MlpConfig, TransformerConfig

# Dense bf16 peak in FLOP/s from NVIDIA's data sheets, SXM parts; the longest matching name wins.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def count_parameters(whole: nn.Module) -> int:
    """Elements of all parameters of an unsharded model (on ``meta``, say)."""
    return sum(parameter.numel() for parameter in whole.parameters())


def flop_per_sample(config: MlpConfig | TransformerConfig, parameters: int, sequence: int) -> int:
    """Floating-point operations to train on one sample, forward and backward, without recomputation.

    Transformer, per token: ``6·(N − N_emb) + 12·L·H·d_head·sequence`` (PaLM, Chowdhery et al., 2022, appendix B), which
    counts attention as if it were not causal, as is customary. MLP: ``6·N``.
    """
    if isinstance(config, MlpConfig):
        return 6 * parameters
    matrices = parameters - config.vocab_size * config.dim
    return (6 * matrices + 12 * config.layers * config.dim * sequence) * sequence


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of a CUDA device by its name; None when it isn't known."""
    return next((PEAKS[name] for name in sorted(PEAKS, key=len, reverse=True) if device_name.startswith(name)), None)
