"""Whole numbers that depend on the input: what they may be read by, and where a cast to them changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnx import TensorProto

from service.bounds.operators.onnx import Array, Call

TYPES = frozenset({TensorProto.INT32, TensorProto.INT64})
"""The types of integers that values are cast to: smaller ones wrap around, which nothing here does."""
_WHOLE = frozenset({"Ceil", "Floor", "Round", "Sign"})
_MOVING = [
    "Compress",
    "Concat",
    "Expand",
    "Flatten",
    "GatherElements",
    "GatherND",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
]
_READERS = frozenset(
    [
        *_MOVING,
        "Cast",
        "ai.onnx.ml.ArrayFeatureExtractor",
        "ConvInteger",
        "DequantizeLinear",
        "Equal",
        "Gather",
        "MatMulInteger",
        "MaxPool",
        "OneHot",
        "QLinearConv",
        "QLinearMatMul",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Checks that integers only reach operators that treat them as real numbers: integer arithmetic differs."""


def checked(calls: Sequence[Call], values: Mapping[str, Array], depends: Collection[str]) -> list[Call]:
    """Return the calls, with an identity for each cast of a value that is whole already.

    Raises :class:`~service.bounds.graph.UnsupportedModelError` for a call that computes with such numbers.
    """
    whole = {name for name in depends if name in values and values[name].dtype.kind in "biu"}
    whole |= {name for call in calls if call.operator in _WHOLE for name in call.outputs}
    found = list[Call]()
    for call in calls:
        integers = [
            name for name in call.inputs if name in depends and name in values and values[name].dtype.kind in "iu"
        ]
        if integers and call.operator not in _READERS:
            raise call.refuse(
                f"it computes with whole numbers, {integers[0]!r}, that depend on the input; expected a Cast of them "
                "to floating-point numbers before it"
            )
        if call.operator == "Cast" and call.attributes["to"] in TYPES and call.inputs[0] in whole:
            call = replace(call, operator="Identity", attributes={})  # noqa: PLW2901 - the call that is kept
        found.append(call)
    return found
