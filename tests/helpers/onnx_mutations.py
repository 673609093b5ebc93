"""Small ONNX files, and random changes of their bytes and of their fields."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import numpy_helper
from onnx_models import dense, model, node, weights


def small_models() -> dict[str, bytes]:
    """By what is in them; together they have attributes, constants and initializers of every common type."""
    return {
        "dense": dense([3, 4, 2]),
        "convolution": _convolution(),
        "arithmetic": _arithmetic(),
        "normalised": _normalised(),
    }


def _convolution() -> bytes:
    shape = numpy_helper.from_array(np.array([1, 18]), "shape")
    return model(
        [
            node("Conv", ["x", "w", "b"], "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
            node("LeakyRelu", ["c"], "a", alpha=0.1),
            node("Constant", [], "shape", value=shape),
            node("Reshape", ["a", "shape"], "f"),
            node("Gemm", ["f", "v"], "y", alpha=0.5, transB=1),
        ],
        [1, 1, 5, 5],
        {"w": weights(2, 1, 3, 3), "b": weights(2), "v": weights(3, 18)},
    )


def _arithmetic() -> bytes:
    return model(
        [
            node("Unsqueeze", ["x", "axes"], "u"),
            node("Concat", ["u", "u"], "d", axis=2),
            node("Slice", ["d", "starts", "ends", "positions", "steps"], "s"),
            node("ReduceMean", ["s"], "m", axes=[1], keepdims=0),
            node("Clip", ["m", "least", "most"], "k"),
            node("Constant", [], "half", value_float=0.5),
            node("Mul", ["k", "half"], "h"),
            node("Softmax", ["h"], "y", axis=1),
        ],
        ["batch", 4],
        {
            "axes": np.array([1]),
            "starts": np.array([0, 0, 0]),
            "ends": np.array([1, 1, 6]),
            "positions": np.array([0, 1, 2]),
            "steps": np.array([1, 1, 2]),
            "least": np.float32(-1),
            "most": np.float32(1),
        },
    )


def _normalised() -> bytes:
    return model(
        [
            node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], "n", epsilon=1e-3),
            node("Elu", ["n"], "e", alpha=0.7),
            node("Pad", ["e", "pads"], "p", mode="constant"),
            node("AveragePool", ["p"], "y", kernel_shape=[2, 2], strides=[2, 2]),
        ],
        [1, 2, 3, 3],
        {
            "scale": weights(2), "shift": weights(2), "mean": weights(2), "variance": np.ones(2, np.float32),
            "pads": np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        },
    )  # fmt: skip


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Up to three bytes flipped, left out or put in, or an end cut off."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(changed))
        match draw.choice(["flip", "leave", "insert", "cut"]):
            case "flip":
                changed[place] = draw.randrange(256)
            case "leave":
                del changed[place]
            case "insert":
                changed.insert(place, draw.randrange(256))
            case _:
                del changed[max(1, place) :]
    return bytes(changed)


def of_a_field(data: bytes, draw: random.Random) -> bytes:
    """One field of one message, anywhere, cleared, repeated or set to an odd value."""
    changed = onnx.load_from_string(data)
    message, field = draw.choice(list(_fields(changed)))
    value = getattr(message, field.name)
    if field.is_repeated:
        items = list(value)
        items = draw.choice([[], items[:-1], [*items, items[-1]], items[::-1], _odd_items(items, draw)])
        message.ClearField(field.name)
        getattr(message, field.name).extend(items)
    elif isinstance(value, Message) or draw.random() < 0.2:
        message.ClearField(field.name)
    elif field.enum_type is not None:
        setattr(message, field.name, draw.choice([each.number for each in field.enum_type.values]))
    else:
        setattr(message, field.name, _odd(value, draw))
    return bytes(changed.SerializeToString())


def _fields(message: Message) -> Iterator[tuple[Any, Any]]:
    for field, value in message.ListFields():
        yield message, field
        for each in value if field.is_repeated else [value]:
            if isinstance(each, Message):
                yield from _fields(each)


def _odd_items(items: Sequence[Any], draw: random.Random) -> list[Any]:
    if isinstance(items[0], Message):
        return [*items, *items]
    place = draw.randrange(len(items))
    return [*items[:place], _odd(items[place], draw), *items[place + 1 :]]


def _odd(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([0, 1, 2, 3, 7, 16, 99, 2**31 - 1, -1])
    if isinstance(value, float):
        return draw.choice([0.0, -1.0, math.nan, math.inf, -math.inf, 3e38])
    if isinstance(value, bytes):
        return draw.choice([b"", value[:-1], value * 2, b"\xff\xfe", bytes(len(value)), b"\xff" * len(value)])
    return draw.choice(["", "x", "y", value + "_", "Relu", "Loop", "Constant", "ünbekannt"])
