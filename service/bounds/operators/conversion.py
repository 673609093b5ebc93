"""ONNX nodes as converters see them: a call, and values with and without a batch of their own.

An operator that ONNX also has lists its converters, by their ONNX names, in :attr:`Operator.onnx`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from service.bounds.graph import UnsupportedModelError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Call:
    """One node. ``inputs`` are names, empty for an optional one that is absent."""

    name: str
    operator: str
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int

    def __str__(self) -> str:
        return f"ONNX {self.operator} (node {self.name!r})"

    def refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self}: {reason}")


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the model; ``shape`` is its shape in the file at a batch of one.

    A value that depends on the input is a ``tensor`` ``(instances, *shape)``: instances never mix, whatever the model
    does with its own first dimension. A constant has its value in ``array``, and also in ``tensor`` if it is a float.
    Whole numbers below n may come with ``places`` ``(instances, *shape, n)``: 1 where a number is that one, and else 0.
    """

    shape: tuple[int, ...]
    tensor: Tensor | None
    array: Array | None = None
    places: Tensor | None = None

    @property
    def present(self) -> bool:
        """Return whether the node has this input: optional ones may be left out."""
        return self.tensor is not None or self.array is not None

    @property
    def constant(self) -> bool:
        return self.array is not None

    @property
    def float(self) -> Tensor:
        if self.tensor is None:
            raise TypeError("a constant of integers where floating-point numbers are expected")
        return self.tensor

    @property
    def integers(self) -> list[int]:
        """Return the entries of a constant."""
        assert self.array is not None
        return [int(entry) for entry in self.array.reshape(-1)]


@dataclass(frozen=True, eq=False)
class ChosenPlaces:
    """Whole numbers ``(instances, *shape)`` below n, and truths ``(instances, *shape, n)``: which one each is."""

    numbers: Tensor
    truths: Tensor


Values = Sequence[Value]
Shape = tuple[int, ...]
Found = Tensor | ChosenPlaces
Converted = Found | Sequence[Found]
"""A node's first output, or its first ones."""
Converter = Callable[[Call, Values, Shape], Converted]
ABSENT = Value((), None)
"""An optional input that is left out, with others after it."""


def optional(values: Values, index: int) -> Value | None:
    """Return the input at that position, if the node has it."""
    return values[index] if index < len(values) and values[index].present else None


def integers(call: Call, values: Values, index: int, attribute: str) -> list[int] | None:
    """Return a list that is an attribute in early opsets and a constant input in later ones."""
    if attribute in call.attributes:
        return [int(entry) for entry in call.attributes[attribute]]
    value = optional(values, index)
    if value is None:
        return None
    if not value.constant:
        raise call.refuse(f"its {attribute} depends on the input")
    return value.integers


def number(call: Call, values: Values, index: int, attribute: str) -> float | None:
    """Return the same for a single number."""
    if attribute in call.attributes:
        return float(call.attributes[attribute])
    value = optional(values, index)
    if value is None:
        return None
    if value.array is None:
        raise call.refuse(f"its {attribute} depends on the input")
    return single(call, value, attribute)


def single(call: Call, value: Value, what: str) -> float:
    """Return the number that all entries of a constant equal."""
    assert value.array is not None
    entries = value.array.reshape(-1)
    if not len(entries) or bool((entries != entries[0]).any()):
        raise call.refuse(f"its {what} has different entries; one number is supported")
    return float(entries[0])


def aligned(values: Sequence[Value]) -> list[Tensor]:
    """Return tensors that broadcast as the model's values do: those with a batch get the longest's dimensions."""
    rank = max(len(value.shape) for value in values)
    return [
        value.float if value.constant else value.float.reshape(-1, *(1,) * (rank - len(value.shape)), *value.shape)
        for value in values
    ]


def repeated(value: Value, batch: int) -> Tensor:
    """Return a constant as often as there are images in one instance, for the channels of each."""
    return value.float if batch == 1 else torch.cat([value.float] * batch)


def axis(given: int, rank: int) -> int:
    """Return an axis of the model as a dimension of a tensor with a batch."""
    return given % rank + 1


def entrywise(function: Callable[..., Tensor], **numbers: float) -> Converter:
    """Return the converter of a function of one value, and of attributes that are ``numbers`` by default."""
    return lambda call, values, shape: function(
        values[0].float, *(float(call.attributes.get(name, number)) for name, number in numbers.items())
    )


def of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Converter:
    """Return the converter of an entrywise function, with broadcasting; of more than two values in a row."""
    return lambda call, values, shape: reduce(function, aligned(values))
