"""Converters of attention as one operator: ONNX's own, and onnxruntime's fused ones. Masks are constants."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt

import torch
from torch import Tensor

from service.bounds.operators.onnx import Call, Converter, Shape, Value, Values, optional


def attention(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Attend as ONNX's operator does, to heads ``(batch, heads, length, width)`` or side by side."""
    _refuse_inputs(call, values, range(4, 7))
    if float(call.attributes.get("softcap", 0.0)) or call.outputs[1:]:
        raise call.refuse("a soft cap, and outputs after the first, are not supported")
    names = ("q_num_heads", "kv_num_heads", "kv_num_heads")
    query, key, values_ = (
        value.float if len(value.shape) == 4 else _heads(value.float, int(call.attributes[name]))
        for value, name in zip(values[:3], names, strict=True)
    )
    repeats = query.shape[2] // key.shape[2]
    key, values_ = (each if repeats == 1 else each.repeat_interleave(repeats, dim=2) for each in (key, values_))
    mask = _mask(call, optional(values, 3), query)
    found = _attended(call, query, key, values_, mask, causal=bool(call.attributes.get("is_causal", 0)))
    return [found if len(shape) == 4 else _side_by_side(found)]


def fused_attention(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Attend with the projections to queries, keys and values, whose weights are side by side."""
    _refuse_inputs(call, values, (4, 6, *range(7, len(values))))
    if call.attributes.get("do_rotary", 0) or any(call.outputs[1:]):
        raise call.refuse("rotary embeddings, and outputs after the first, are not supported")
    projected, bias, heads = torch.matmul(values[0].float, values[1].float), optional(values, 2), _heads_of(call)
    projected = projected if bias is None else projected + bias.float
    sizes = [int(each) for each in call.attributes.get("qkv_hidden_sizes", [projected.shape[-1] // 3] * 3)]
    query, key, values_ = (_heads(each, heads) for each in torch.split(projected, sizes, dim=-1))
    mask = _together(_padding(call, optional(values, 3), query), _bias(call, optional(values, 5)))
    causal = bool(call.attributes.get("unidirectional", 0))
    return [_side_by_side(_attended(call, query, key, values_, mask, causal=causal))]


def multi_head_attention(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Attend with queries, keys and values that are given, side by side or packed; a bias is added to all of them."""
    _refuse_inputs(call, values, range(6, len(values)))
    given = [optional(values, index) for index in range(3)]
    if any(each is None or len(each.shape) != 3 for each in given) or any(call.outputs[1:]):
        raise call.refuse("queries, keys and values of three dimensions each, and one output, are supported")
    heads, bias = _heads_of(call), optional(values, 3)
    flat = [each.float for each in given if each is not None]
    if bias is not None:
        parts = torch.split(bias.float, [each.shape[-1] for each in flat], dim=-1)
        flat = [each + part for each, part in zip(flat, parts, strict=True)]
    query, key, values_ = (_heads(each, heads) for each in flat)
    mask = _together(_padding(call, optional(values, 4), query), _bias(call, optional(values, 5)))
    causal = bool(call.attributes.get("unidirectional", 0))
    return [_side_by_side(_attended(call, query, key, values_, mask, causal=causal))]


def _heads_of(call: Call) -> int:
    return int(call.attributes["num_heads"])


def _heads(x: Tensor, heads: int) -> Tensor:
    """Divide the last dimension, ``(instances, batch, length, heads · width)`` to one head after the other."""
    return x.reshape(*x.shape[:3], heads, x.shape[3] // heads).transpose(2, 3)


def _side_by_side(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(3)


def _attended(call: Call, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    scale = float(call.attributes.get("scale", 0.0)) or 1 / sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        mask = torch.zeros(later.shape, dtype=scores.dtype, device=scores.device) if mask is None else mask
        mask = mask.masked_fill(later, -inf)
    scores = scores if mask is None else scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), values)


def _together(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _bias(call: Call, bias: Value | None) -> Tensor | None:
    """Return what is added to scores, ``(batch, heads, queries, keys)``; ``None`` where nothing is."""
    if bias is None:
        return None
    if bias.array is None:
        raise call.refuse("what it adds to its scores depends on the input")
    return bias.float


def _mask(call: Call, mask: Value | None, like: Tensor) -> Tensor | None:
    """Return the same of a mask that may have truths in it: what is false is left out."""
    if mask is None or mask.array is None or mask.array.dtype.kind != "b":
        return _bias(call, mask)
    if bool(mask.array.all()):
        return None
    kept = torch.tensor(mask.array, device=like.device)
    return torch.zeros(kept.shape, dtype=like.dtype, device=like.device).masked_fill(~kept, -inf)


def _padding(call: Call, mask: Value | None, like: Tensor) -> Tensor | None:
    """Return the same of a mask of keys, ``(batch, keys)`` or ``(batch, queries, keys)``, with 0 at those that are left
    out.
    """
    if mask is None:
        return None
    if mask.array is None or mask.array.ndim not in (2, 3):
        raise call.refuse("a mask of keys that depends on the input, or that has their number only, is not supported")
    left_out = torch.from_numpy(mask.array == 0).to(like.device)
    lowest = float(call.attributes.get("mask_filter_value", -10000.0))
    filled = torch.zeros(left_out.shape, dtype=like.dtype, device=like.device).masked_fill(left_out, lowest)
    return filled[:, None, None] if filled.ndim == 2 else filled[:, None]


def _refuse_inputs(call: Call, values: Values, places: range | tuple[int, ...]) -> None:
    found = [index for index in places if optional(values, index) is not None]
    if found:
        raise call.refuse(
            f"its input {call.inputs[found[0]]!r}, of keys and values before or of lengths, is not supported"
        )


CONVERTERS: Mapping[str, Converter] = {
    "Attention": attention,
    "com.microsoft.Attention": fused_attention,
    "com.microsoft.MultiHeadAttention": multi_head_attention,
}
