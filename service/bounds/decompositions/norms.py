"""Rewrites norms and softmax as sums, products, roots and reciprocals."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def batch_norm(  # noqa: PLR0917 - the signature of the operator, as below
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise by the running statistics: a multiple of each channel and a constant."""
    if training:
        raise NotImplementedError("a batch norm by the statistics of the batch")
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    trailing = [1] * (x.ndim - 2)
    return x * scale.reshape(-1, *trailing) + shift.reshape(-1, *trailing)


def layer_norm(  # noqa: PLR0917
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    over = list(range(-len(normalized_shape), 0))
    centred = x - x.mean(over, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(over, keepdim=True) + eps)
    return _scaled(normed, weight, bias)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    over = list(range(-len(normalized_shape), 0))
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * torch.rsqrt((x * x).mean(over, keepdim=True) + smallest), weight, None)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def softmax(x: Tensor, dim: int, half_to_float: Any = None) -> Tensor:
    """Write softmax without the usual shift, which changes no value: bounds of large scores become infinite."""
    powers = torch.exp(x)
    return powers * torch.reciprocal(powers.sum([dim], keepdim=True))


def log_softmax(x: Tensor, dim: int, half_to_float: Any = None) -> Tensor:
    return x - log_sum(x, [dim], True)


def log_sum(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    return torch.log(torch.exp(x).sum(list(dim), keepdim=keepdim))


def variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    over = list(dim) if dim else list(range(x.ndim))
    centred = x - x.mean(over, keepdim=True)
    count = torch.Size(x.shape[index] for index in over).numel()
    return (centred * centred).sum(over, keepdim=keepdim) / (count - (1 if correction is None else correction))


def vector_norm(
    x: Tensor, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if dim is None or order not in (1, 2):
        raise NotImplementedError(f"a norm of order {order} over dimensions {dim}; 1 and 2 over some are supported")
    if order == 1:
        return x.abs().sum(list(dim), keepdim=keepdim)
    return torch.sqrt((x * x).sum(list(dim), keepdim=keepdim))


def group_norm(  # noqa: PLR0917
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    groups = x.reshape(x.shape[0], num_groups, -1)
    normed = layer_norm(groups, groups.shape[-1:], None, None, eps).reshape(x.shape)
    trailing = [1] * (x.ndim - 2)
    return _scaled(
        normed,
        None if weight is None else weight.reshape(-1, *trailing),
        None if bias is None else bias.reshape(-1, *trailing),
    )


def instance_norm(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not use_input_stats and running_mean is not None and running_var is not None:
        return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return group_norm(x, x.shape[1], weight, bias, eps)


def attention(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax attention; excluded entries of a mask get a weight of 0 rather than a score of −∞."""
    if enable_gqa:
        raise NotImplementedError("attention with enable_gqa")
    if dropout_p:
        raise NotImplementedError(f"attention with dropout_p {dropout_p}, which draws random numbers")
    scores = aten.matmul(query, key.transpose(-2, -1)) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    allowed = None
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=query.dtype, device=query.device).tril()
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = attn_mask.to(query.dtype)
    elif attn_mask is not None:
        scores = scores + attn_mask
    powers = torch.exp(scores)
    if allowed is not None:
        powers = powers * allowed
    mixed: Tensor = aten.matmul(powers * torch.reciprocal(powers.sum([-1], keepdim=True)), value)
    return mixed
