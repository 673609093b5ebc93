"""Converters of comparisons, of logical operators, and of choices by them: a truth is the number 1 or 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from service.bounds.operators.choice import choose
from service.bounds.operators.conversion import (
    Call,
    Converted,
    Converter,
    Shape,
    Value,
    Values,
    aligned,
    entrywise,
    of_two,
)

Pair = Callable[[Tensor, Tensor], Tensor]
MOST_WHOLE = 2**24
"""The largest whole number up to which float32 has all of them."""


def positive(x: Tensor) -> Tensor:
    """Return 1 where a value is above 0, and else 0."""
    return choose(x, *(torch.full((), number, dtype=x.dtype, device=x.device) for number in (1.0, 0.0)))


def _convert_pair(function: Pair) -> Converter:
    """Return the converter of a function of two truths, or of two values in ``Equal``."""

    def convert(call: Call, values: Values, shape: Shape) -> Tensor:
        like = next(value.float for value in values if value.tensor is not None)
        left, right = aligned([_truth(value, like) for value in values])
        return function(left, right)

    return convert


def _equal(call: Call, values: Values, shape: Shape) -> Converted:
    """Compare a difference with 0 from both sides, that of whole numbers half a step away: no rounding decides."""
    constants = [value.array for value in values if value.array is not None and value.array.dtype.kind in "iu"]
    if any(array.size and int(np.abs(array.astype(np.float64)).max()) > MOST_WHOLE for array in constants):
        raise call.refuse(f"it compares with a whole number above {MOST_WHOLE}")

    def are_equal(x: Tensor, y: Tensor) -> Tensor:
        above, below = (x - y - 0.5, y - x - 0.5) if constants else (x - y, y - x)
        return (1 - positive(above)) * (1 - positive(below))

    return _convert_pair(are_equal)(call, values, shape)


def _truth(value: Value, like: Tensor) -> Value:
    """Return a constant of truths as numbers."""
    if value.tensor is not None or value.array is None:
        return value
    return Value(value.shape, torch.from_numpy(value.array.astype("float64")).to(like), value.array)


def _answered(found: Tensor, like: Tensor) -> Tensor:
    yes, no = (torch.full((), number, dtype=like.dtype, device=like.device) for number in (1.0, 0.0))
    return torch.where(found, yes, no)


def _is_infinite(call: Call, values: Values, shape: Shape) -> Tensor:
    x = values[0].float
    asks = [bool(call.attributes.get(f"detect_{sign}", 1)) for sign in ("positive", "negative")]
    if not any(asks):
        return x.clamp(0, 0)
    return _answered(x.abs() == torch.inf if all(asks) else x == (torch.inf if asks[0] else -torch.inf), x)


CONVERTERS: Mapping[str, Converter] = {
    "And": _convert_pair(lambda x, y: x * y),
    "Equal": _equal,
    "Greater": of_two(lambda x, y: positive(x - y)),
    "GreaterOrEqual": of_two(lambda x, y: 1 - positive(y - x)),
    "IsInf": _is_infinite,
    "IsNaN": entrywise(lambda x: _answered(torch.isnan(x), x)),
    "Less": of_two(lambda x, y: positive(y - x)),
    "LessOrEqual": of_two(lambda x, y: 1 - positive(x - y)),
    "Not": entrywise(lambda x: 1 - x),
    "Or": _convert_pair(lambda x, y: x + y - x * y),
    "Sign": entrywise(lambda x: positive(x) - positive(-x)),
    "Xor": _convert_pair(lambda x, y: x + y - 2 * x * y),
}
