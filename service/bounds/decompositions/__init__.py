"""Rewrites operators in terms of others that have rules.

Each entry has its operator's signature. All of them are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import torch

from service.bounds.decompositions import elementwise, indexing, norms, windows

aten = torch.ops.aten


def _of_each_rank(name: str, function: Callable[..., Any], overload: str = "default") -> dict[Any, Callable[..., Any]]:
    return {getattr(getattr(aten, name.format(rank)), overload): _of_rank(rank, function) for rank in (1, 2, 3)}


def _of_rank(rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``(batch, channels, *shape)`` that takes values without channels, too, as torch does."""

    def of_either(x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if x.ndim > rank + 1:
            return function(x, *arguments, **named)
        found = function(x.unsqueeze(1), *arguments, **named)
        return found.squeeze(1) if isinstance(found, torch.Tensor) else (found[0].squeeze(1), *found[1:])

    return of_either


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.clamp.default: elementwise.clamp,
    aten.clamp.Tensor: elementwise.clamp,
    aten.clamp_min.default: elementwise.clamp,
    aten.clamp_max.default: lambda x, highest: elementwise.clamp(x, None, highest),
    aten.hardtanh.default: elementwise.hardtanh,
    aten.relu6.default: lambda x: elementwise.clamp(x, 0.0, 6.0),
    aten.minimum.default: elementwise.minimum,
    aten.prelu.default: elementwise.prelu,
    aten._prelu_kernel.default: elementwise.two_pieces,
    aten.rrelu.default: elementwise.rrelu,
    aten.celu.default: lambda x, alpha=1.0: aten.elu(x, alpha, 1.0, 1 / alpha),
    aten.log_sigmoid_forward.default: elementwise.log_sigmoid,
    aten.log_sigmoid.default: lambda x: elementwise.log_sigmoid(x)[0],
    aten.glu.default: elementwise.glu,
    aten.ceil.default: lambda x: -torch.floor(-x),
    aten.round.default: elementwise.round_,
    aten.expm1.default: lambda x: torch.exp(x) - 1,
    aten.exp2.default: lambda x: elementwise.power_of(2.0, x),
    aten.pow.Scalar: elementwise.power_of,
    aten.log1p.default: lambda x: torch.log(1 + x),
    aten.log2.default: lambda x: torch.log(x) * (1 / log(2)),
    aten.log10.default: lambda x: torch.log(x) * (1 / log(10)),
    aten.sinh.default: lambda x: (torch.exp(x) - torch.exp(-x)) / 2,
    aten.cosh.default: lambda x: (torch.exp(x) + torch.exp(-x)) / 2,
    aten.erfc.default: lambda x: 1 - torch.erf(x),
    aten.batch_norm.default: norms.batch_norm,
    aten._native_batch_norm_legit_no_training.default: lambda x, weight, bias, mean, var, momentum, eps: (
        norms.batch_norm(x, weight, bias, mean, var, False, momentum, eps),
        x.new_empty(0),
        x.new_empty(0),
    ),
    aten.layer_norm.default: norms.layer_norm,
    aten.rms_norm.default: norms.rms_norm,
    aten.group_norm.default: norms.group_norm,
    aten.instance_norm.default: norms.instance_norm,
    aten.var.correction: norms.variance,
    aten.std.correction: lambda x, dim=None, **options: torch.sqrt(norms.variance(x, dim, **options)),
    aten.linalg_vector_norm.default: norms.vector_norm,
    aten.softmax.int: lambda x, dim, dtype=None: norms.softmax(x, dim),
    aten._softmax.default: norms.softmax,
    aten._safe_softmax.default: lambda x, dim, dtype=None: norms.softmax(x, dim),
    aten.log_softmax.int: lambda x, dim, dtype=None: norms.log_softmax(x, dim),
    aten._log_softmax.default: norms.log_softmax,
    aten.logsumexp.default: norms.log_sum,
    aten.scaled_dot_product_attention.default: norms.attention,
    **_of_each_rank("avg_pool{}d", windows.average_pool),
    **_of_each_rank("max_pool{}d", windows.max_pool),
    aten.max_pool3d_with_indices.default: windows.max_pool_with_indices,
    **_of_each_rank("adaptive_avg_pool{}d", windows.adaptive_average_pool),
    aten._adaptive_avg_pool2d.default: windows.adaptive_average_pool,
    aten._adaptive_avg_pool3d.default: windows.adaptive_average_pool,
    **_of_each_rank("adaptive_max_pool{}d", windows.adaptive_max_pool),
    **_of_each_rank("upsample_nearest{}d", windows.upsample_nearest, "vec"),
    aten.upsample_linear1d.vec: windows.upsample_linear,
    aten.upsample_bilinear2d.vec: windows.upsample_linear,
    aten.upsample_trilinear3d.vec: windows.upsample_linear,
    aten.amax.default: windows.largest,
    aten.amin.default: windows.smallest,
    aten.max.dim: lambda x, dim, keepdim=False: (windows.largest(x, dim, keepdim), x.new_empty(0)),
    aten.min.dim: lambda x, dim, keepdim=False: (windows.smallest(x, dim, keepdim), x.new_empty(0)),
    aten.prod.dim_int: windows.multiplied,
    aten.select.int: indexing.select,
    aten.split_with_sizes.default: indexing.split_with_sizes,
    aten.flip.default: indexing.flip,
    aten.repeat.default: indexing.repeat,
    aten.cumsum.default: indexing.cumulated,
    aten.index.Tensor: indexing.indexed,
    aten.pad.default: indexing.pad,
    aten.bilinear.default: indexing.bilinear,
}
