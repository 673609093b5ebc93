"""Converters of attention as one operator: ONNX's own, and onnxruntime's fused ones. Masks are constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, sqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from service.bounds.operators.conversion import Call, Converter, Shape, Value, Values, optional

Mask = npt.NDArray[np.float64] | None
"""The constant added to scores, ``None`` for nothing."""


def _attention(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Attend as ONNX's operator does, to heads ``(batch, heads, length, width)`` or side by side."""
    _refuse_inputs(call, values, range(4, 7))
    if float(call.attributes.get("softcap", 0.0)) or call.outputs[1:]:
        raise call.refuse("a soft cap, and outputs after the first, are not supported")
    names = ("q_num_heads", "kv_num_heads", "kv_num_heads")
    query, key, values_ = (
        _of_instances(value) if len(value.shape) == 4 else _heads(_of_instances(value), int(call.attributes[name]))
        for value, name in zip(values[:3], names, strict=True)
    )
    repeats = query.shape[2] // key.shape[2]
    key, values_ = (each if repeats == 1 else each.repeat_interleave(repeats, dim=2) for each in (key, values_))
    mask = _mask(call, optional(values, 3))
    found = _attended(call, query, key, values_, mask, causal=bool(call.attributes.get("is_causal", 0)))
    return [found if len(shape) == 4 else _side_by_side(found)]


def _fused_attention(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Attend with the projections to queries, keys and values, whose weights are side by side."""
    _refuse_inputs(call, values, (4, 6, *range(7, len(values))))
    if call.attributes.get("do_rotary", 0) or any(call.outputs[1:]):
        raise call.refuse("rotary embeddings, and outputs after the first, are not supported")
    projected, bias = torch.matmul(values[0].float, values[1].float), optional(values, 2)
    projected = projected if bias is None else projected + bias.float
    sizes = [int(each) for each in call.attributes.get("qkv_hidden_sizes", [projected.shape[-1] // 3] * 3)]
    mask = _sum(_padding(call, optional(values, 3)), _bias(call, optional(values, 5)))
    return _attended_by_heads(call, torch.split(projected, sizes, dim=-1), mask)


def _multi_head_attention(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Attend with queries, keys and values that are given, side by side or packed; a bias is added to all of them."""
    _refuse_inputs(call, values, range(6, len(values)))
    given = [optional(values, index) for index in range(3)]
    if any(each is None or len(each.shape) != 3 for each in given) or any(call.outputs[1:]):
        raise call.refuse("queries, keys and values of three dimensions each, and one output, are supported")
    bias, flat = optional(values, 3), [_of_instances(each) for each in given if each is not None]
    if bias is not None:
        parts = torch.split(bias.float, [each.shape[-1] for each in flat], dim=-1)
        flat = [each + part for each, part in zip(flat, parts, strict=True)]
    return _attended_by_heads(call, flat, _sum(_padding(call, optional(values, 4)), _bias(call, optional(values, 5))))


def _attended_by_heads(call: Call, flat: Iterable[Tensor], mask: Mask) -> list[Tensor]:
    """Attend with queries, keys and values of heads that are side by side, as the result's are."""
    query, key, values = (_heads(each, int(call.attributes["num_heads"])) for each in flat)
    causal = bool(call.attributes.get("unidirectional", 0))
    return [_side_by_side(_attended(call, query, key, values, mask, causal=causal))]


def _of_instances(value: Value) -> Tensor:
    """Return a value with a dimension of instances; a constant has one, for all of them."""
    return value.float.unsqueeze(0) if value.constant else value.float


def _heads(x: Tensor, heads: int) -> Tensor:
    """Divide the last dimension, ``(instances, batch, length, heads · width)`` to one head after the other."""
    return x.reshape(*x.shape[:3], heads, x.shape[3] // heads).transpose(2, 3)


def _side_by_side(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(3)


def _attended(call: Call, query: Tensor, key: Tensor, values: Tensor, mask: Mask, *, causal: bool) -> Tensor:
    scale = float(call.attributes.get("scale", 0.0)) or 1 / sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    if causal:
        mask = _sum(mask, np.triu(np.full([int(each) for each in scores.shape[-2:]], -inf), 1))
    if mask is not None and mask.any():
        scores = scores + torch.from_numpy(mask).to(scores)
    return torch.matmul(torch.softmax(scores, dim=-1), values)


def _sum(first: Mask, second: Mask) -> Mask:
    if first is None or second is None:
        return second if first is None else first
    return np.asarray(first + second)


def _bias(call: Call, bias: Value | None) -> Mask:
    """Return the bias of scores, ``(batch, heads, queries, keys)``."""
    if bias is None:
        return None
    if bias.array is None:
        raise call.refuse("what it adds to its scores depends on the input")
    return bias.array.astype(np.float64)


def _mask(call: Call, mask: Value | None) -> Mask:
    """Return the mask as :func:`_bias` does, or of truths, where false excludes."""
    if mask is None or mask.array is None or mask.array.dtype.kind != "b":
        return _bias(call, mask)
    return np.where(mask.array, 0.0, -inf)


def _padding(call: Call, mask: Value | None) -> Mask:
    """Return the same of a mask of keys, ``(batch, keys)`` or ``(batch, queries, keys)``, with 0 at those left out."""
    if mask is None:
        return None
    if mask.array is None or mask.array.ndim not in (2, 3):
        raise call.refuse("a mask of keys that depends on the input, or that has their number only, is not supported")
    filled = np.where(mask.array == 0, float(call.attributes.get("mask_filter_value", -10000.0)), 0.0)
    return filled[:, None, None] if filled.ndim == 2 else filled[:, None]


def _refuse_inputs(call: Call, values: Values, places: range | tuple[int, ...]) -> None:
    found = [index for index in places if optional(values, index) is not None]
    if found:
        raise call.refuse(
            f"its input {call.inputs[found[0]]!r}, of keys and values before or of lengths, is not supported"
        )


CONVERTERS: Mapping[str, Converter] = {
    "Attention": _attention,
    "com.microsoft.Attention": _fused_attention,
    "com.microsoft.MultiHeadAttention": _multi_head_attention,
}
