"""Converters of operators beyond ONNX's own: onnxruntime's fused ones, and those of scikit-learn's models.

``load`` compares each with onnxruntime, which runs them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.onnx.logic import positive
from service.bounds.onnx.matrices import transposed
from service.bounds.onnx.selecting import looked_up, place_of_largest
from service.bounds.operators.conversion import (
    Call,
    Converter,
    Shape,
    Value,
    Values,
    aligned,
    entrywise,
    of_two,
    optional,
)


def _fast_gelu(call: Call, values: Values, shape: Shape) -> Tensor:
    bias = optional(values, 1)
    x = values[0].float if bias is None else sum(aligned([values[0], bias]))
    assert isinstance(x, Tensor)
    return functional.gelu(x, approximate="tanh")


def _fused_product(call: Call, values: Values, shape: Shape) -> Tensor:
    """Multiply matrices, either of them transposed, and the product by a number."""
    unusual = [name for name in ("transBatchA", "transBatchB") if call.attributes.get(name, 0)]
    if unusual:
        raise call.refuse(f"{unusual[0]} is not supported")
    turned = [
        value if not call.attributes.get(name, 0) else transposed(value)
        for value, name in zip(values, ("transA", "transB"), strict=True)
    ]
    left, right = aligned(turned)
    return torch.matmul(left, right) * float(call.attributes.get("alpha", 1.0))


def _normalised_sum(
    places: tuple[int, int | None, int], centred: bool, call: Call, values: Values, shape: Shape
) -> list[Tensor]:
    """Normalise a sum, which is the fourth output; ``places`` are those of weight, bias and a third summand."""
    weight, bias, beside = (None if place is None else optional(values, place) for place in places)
    if any(call.outputs[1:3]):
        raise call.refuse("its mean and its deviation are not supported")
    total = sum(aligned([*values[:2], *([] if beside is None else [beside])]))
    assert isinstance(total, Tensor)
    eps, over = float(call.attributes.get("epsilon", 1e-12 if centred else 1e-6)), shape[-1:]
    scale = None if weight is None else weight.float
    if centred:
        found = functional.layer_norm(total, over, scale, None if bias is None else bias.float, eps)
    else:
        found = functional.rms_norm(total, over, scale, eps)
    return [found, total, total, total]


def _scaler(call: Call, values: Values, shape: Shape) -> Tensor:
    x = values[0].float
    offset, scale = (_listed(call, name, x) for name in ("offset", "scale"))
    return (x - offset) * scale


def _linear_classifier(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Return scores after the label that they choose, which is no number where labels are texts."""
    rows = len(call.attributes["coefficients"]) // values[0].shape[-1]
    found = _scores(call, values, rows)
    place = positive(found) if rows == 1 else place_of_largest(found, found.dim() - 1)
    if rows == 1:  # two classes: the first has the opposite score, and SOFTMAX is not applied
        found = torch.cat([-found, found], dim=-1)
        found = torch.sigmoid(found) if call.attributes.get("post_transform", "NONE") == "LOGISTIC" else found
    else:
        found = _transformed(call, found)
    return [_label(call, place), found]


def _label(call: Call, place: Tensor) -> Tensor:
    """Return the label at a place in the list of them."""
    labels = call.attributes.get("classlabels_ints")
    if labels is None:
        return place * torch.nan
    table = Value((len(labels),), None, np.array(labels, dtype=np.int64))
    return looked_up(call, [table, Value((1,), place)], (1,))


def _scores(call: Call, values: Values, rows: int) -> Tensor:
    x = values[0].float
    weight = _listed(call, "coefficients", x).reshape(rows, -1)
    found = functional.linear(x, weight)
    return found + _listed(call, "intercepts", x) if "intercepts" in call.attributes else found


def _listed(call: Call, name: str, like: Tensor) -> Tensor:
    return torch.tensor([float(each) for each in call.attributes[name]], dtype=like.dtype, device=like.device)


def _transformed(call: Call, scores: Tensor) -> Tensor:
    kind = call.attributes.get("post_transform", "NONE")
    if kind == "NONE":
        return scores
    if kind == "LOGISTIC":
        return torch.sigmoid(scores)
    if kind == "SOFTMAX":
        return torch.softmax(scores, dim=-1)
    raise call.refuse(f"post_transform {kind!r}; NONE, LOGISTIC and SOFTMAX are supported")


def _normalizer(call: Call, values: Values, shape: Shape) -> Tensor:
    x, norm = values[0].float, call.attributes.get("norm", "MAX")
    if norm == "L1":
        return x / x.abs().sum(dim=-1, keepdim=True)
    if norm == "L2":
        return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True))
    if norm == "MAX":
        return x / x.amax(dim=-1, keepdim=True)
    raise call.refuse(f"norm {norm!r}; L1, L2 and MAX are supported")


CONVERTERS: Mapping[str, Converter] = {
    "ai.onnx.ml.Binarizer": entrywise(lambda x, threshold: positive(x - threshold), threshold=0.0),
    "ai.onnx.ml.LinearClassifier": _linear_classifier,
    "ai.onnx.ml.LinearRegressor": lambda call, values, shape: _transformed(
        call, _scores(call, values, int(call.attributes.get("targets", 1)))
    ),
    "ai.onnx.ml.Normalizer": _normalizer,
    "ai.onnx.ml.Scaler": _scaler,
    "com.microsoft.BiasGelu": of_two(lambda x, bias: functional.gelu(x + bias)),
    "com.microsoft.FastGelu": _fast_gelu,
    "com.microsoft.FusedMatMul": _fused_product,
    "com.microsoft.Gelu": entrywise(functional.gelu),
    "com.microsoft.QuickGelu": entrywise(lambda x, alpha: x * torch.sigmoid(alpha * x), alpha=1.702),
    "com.microsoft.SkipLayerNormalization": partial(_normalised_sum, (2, 3, 4), True),
    "com.microsoft.SkipSimplifiedLayerNormalization": partial(_normalised_sum, (2, None, 3), False),
}
