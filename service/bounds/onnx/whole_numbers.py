"""Whole numbers that depend on the input: what they may be read by, and where a cast to them changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
from onnx import TensorProto

from service.bounds.operators.conversion import Array, Call

TYPES: Mapping[int, int] = {TensorProto.INT32: 32, TensorProto.INT64: 64}
"""The types of integers that values are cast to, with their bits: smaller ones wrap around, which nothing here does."""
WHOLE = "trivet.whole"
"""An attribute of a cast of numbers that are whole already."""
SMALL: Mapping[int, type[np.integer[Any]]] = {
    TensorProto.INT8: np.int8,
    TensorProto.INT16: np.int16,
    TensorProto.UINT8: np.uint8,
    TensorProto.UINT16: np.uint16,
}
_WHOLE = frozenset({"Ceil", "Floor", "Round", "Sign"})
_MOVING = [
    "Compress", "Concat", "Expand", "Flatten", "GatherElements", "GatherND", "Identity", "Pad", "Reshape", "Slice",
]  # fmt: skip
_READERS = frozenset([
    *_MOVING, "Cast", "ai.onnx.ml.ArrayFeatureExtractor", "ConvInteger", "DequantizeLinear", "Equal", "Gather",
    "MatMulInteger", "MaxPool", "OneHot", "QLinearConv", "QLinearMatMul", "Scatter", "ScatterElements", "ScatterND",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
])  # fmt: skip
"""Checks that integers only reach operators that treat them as real numbers: integer arithmetic differs."""


def checked(calls: Sequence[Call], values: Mapping[str, Array], depends: Collection[str]) -> list[Call]:
    """Return the calls, with an identity for each cast of a truth or of an integer of no more bits, and a mark on one
    of other values that are whole already. What an operator of :data:`_WHOLE` gives is whole by its definition.

    Raises :class:`~service.bounds.graph.UnsupportedModelError` for a call that computes with such numbers.
    """
    own = {name: values[name].dtype for name in depends if name in values and values[name].dtype.kind in "biu"}
    whole = {name for call in calls if call.operator in _WHOLE for name in call.outputs}
    found, made_by = list[Call](), {name: call for call in calls for name in call.outputs}
    for call in calls:
        if (
            call.operator == "Clip"
            and call.inputs[0] in whole
            and all(each.is_integer() for each in _ends(call, values, depends))
        ):
            whole.add(call.outputs[0])
        integers = [
            name for name in call.inputs if name in depends and name in values and values[name].dtype.kind in "iu"
        ]
        if integers and call.operator not in _READERS:
            raise call.refuse(
                f"it computes with whole numbers, {integers[0]!r}, that depend on the input; expected a Cast of them "
                "to floating-point numbers before it"
            )
        if call.operator == "Cast" and _is_within(call, made_by.get(call.inputs[0]), values, depends):
            call = replace(call, attributes={"to": TensorProto.INT32})  # noqa: PLW2901 - it cannot wrap around
        if call.operator == "Cast" and call.attributes["to"] in TYPES:
            given, bits = own.get(call.inputs[0]), TYPES[call.attributes["to"]]
            if given is not None and 8 * given.itemsize + (given.kind == "u") <= bits:
                call = replace(call, operator="Identity", attributes={})  # noqa: PLW2901 - the call that is kept
            elif given is not None or call.inputs[0] in whole:
                call = replace(call, attributes={**call.attributes, WHOLE: 1})  # noqa: PLW2901 - as above
        found.append(call)
    return found


def _is_within(cast: Call, clip: Call | None, values: Mapping[str, Array], depends: Collection[str]) -> bool:
    """Return whether a cast to small integers is of a clip to constants that its type has: all between are then cut
    off after the point, as of larger integers.
    """
    if cast.attributes["to"] not in SMALL or clip is None or clip.operator != "Clip":
        return False
    kind = np.iinfo(SMALL[cast.attributes["to"]])
    least, most = _ends(clip, values, depends)
    return bool(kind.min <= least <= most <= kind.max)


def _ends(clip: Call, values: Mapping[str, Array], depends: Collection[str]) -> tuple[float, float]:
    """Return the ends of a clip; infinite where it has none, NaN where one depends on the input."""
    ends = [float(clip.attributes.get("min", -inf)), float(clip.attributes.get("max", inf))]
    for index, name in enumerate(clip.inputs[1:3]):
        if name:
            ends[index] = nan if name in depends or name not in values else float(values[name])
    return ends[0], ends[1]
